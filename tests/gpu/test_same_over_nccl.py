"""The tests of tests/dist over NCCL: the same functions, with this folder's fixtures."""

# ruff: noqa: F401, F403
from test_checkpoints import (
    test_a_checkpoint_fits_another_world_size_and_hook,
    test_a_resumed_run_equals_an_uninterrupted_one,
    test_an_interrupted_rank_saves_alone,
    test_the_learning_rate_finder_leaves_no_trace_in_hook_state,
)
from test_exact import *
from test_gradient_check import (
    test_unequal_gradients_raise_with_the_parameters_name,
)
from test_lifecycle import (
    test_disabled_is_stock_ddp_with_stock_settings,
    test_fit_validate_fit_equals_stock,
    test_precisions,
    test_static_graph_trains_with_unused_parameters,
    test_validate_test_and_predict_wrap_nothing,
    test_what_only_the_model_shows_is_refused_before_the_wrap,
)
from test_lossy import *
from test_manual import (
    test_several_backwards_in_a_step_equal_stock,
    test_toggled_optimizers_equal_stock,
)
from test_rewraps import (
    test_a_re_wrap_does_not_forget_which_parameters_a_window_used,
    test_a_schedule_of_accumulation_equals_stock,
    test_backbone_finetuning_keeps_the_ranks_equal,
    test_ignored_and_empty_parameters,
    test_layers_frozen_within_an_accumulation_window,
    test_re_wraps_leave_no_wrapper_and_no_memory_behind,
    test_unfrozen_layers_are_reduced,
    test_unfrozen_layers_are_reduced_in_manual_optimisation,
)
from test_user_hooks import (
    test_callable_hooks_run,
    test_post_local_sgd_averages_on_the_cpu_too,
    test_torchs_own_hooks_run_on_the_cpu_too,
)
