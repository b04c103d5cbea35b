"""Plans and hook specifications as values."""

import copy
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ddpopt.plan import HOOK_DEFAULTS, HookSpec, Plan

capacities = st.floats(2.0**-20, 2.0**42)
specs = st.one_of(
    st.sampled_from([HookSpec(name) for name in HOOK_DEFAULTS]),
    st.builds(
        lambda rank, start, rate, feedback: HookSpec(
            "powersgd",
            {
                "matrix_approximation_rank": rank,
                "start_powerSGD_iter": start,
                "min_compression_rate": rate,
                "use_error_feedback": feedback,
            },
        ),
        st.integers(1, 64),
        st.integers(0, 5000),
        st.floats(0, 1e6),
        st.booleans(),
    ),
)
plans = st.builds(
    Plan,
    static_graph=st.booleans(),
    gradient_as_bucket_view=st.booleans(),
    bucket_cap_mb=st.one_of(st.none(), capacities, st.lists(capacities, min_size=1, max_size=5)),
    hook=specs,
)


@given(plans)
def test_a_plan_survives_json_pickle_and_copies(plan: Plan) -> None:
    for same in (Plan.from_json(plan.to_json()), pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert same == plan
        assert hash(same) == hash(plan)
        assert str(same) == str(plan)


@given(plans, plans)
def test_plans_are_equal_exactly_if_their_json_is(one: Plan, other: Plan) -> None:
    assert (one == other) == (one.to_dict() == other.to_dict())


def test_defaults_and_spelled_out_defaults_are_one_plan() -> None:
    assert Plan(hook=HookSpec("powersgd")) == Plan(hook=HookSpec("powersgd", dict(HOOK_DEFAULTS["powersgd"])))
    assert Plan(bucket_cap_mb=25) == Plan(bucket_cap_mb=25.0)
    assert Plan(bucket_cap_mb=[1, 2]) == Plan(bucket_cap_mb=(1.0, 2.0))
    assert Plan() != Plan.stock()


def test_a_plan_cannot_be_changed() -> None:
    plan = Plan(hook=HookSpec("powersgd"))
    with pytest.raises(AttributeError):
        plan.static_graph = True
    with pytest.raises(TypeError):
        plan.hook.options["matrix_approximation_rank"] = 8


def test_options_given_are_not_shared_with_the_caller() -> None:
    options = {"matrix_approximation_rank": 4}
    spec = HookSpec("powersgd", options)
    options["matrix_approximation_rank"] = 8
    assert spec.options["matrix_approximation_rank"] == 4


def test_a_plan_reads_as_a_sentence() -> None:
    plan = Plan(True, False, [1, 25], HookSpec("powersgd", {"matrix_approximation_rank": 4}))
    assert str(plan) == (
        "static graph, no bucket view, bucket capacities 1, 25 MiB, hook powersgd(matrix_approximation_rank=4)"
    )
    assert str(Plan()) == "dynamic graph, bucket view, torch's default bucket capacity, hook none"


@pytest.mark.parametrize(
    "cap",
    [
        0,
        -1,
        float("inf"),
        float("nan"),
        "25",
        "auto",
        b"25",
        True,
        [],
        [25, 0],
        ["25"],
        [[1]],
        2**60,
        10**400,
        1e-9,
        {},
    ],
)
def test_capacities_that_ddp_would_misread_are_refused(cap: object) -> None:
    with pytest.raises(ValueError, match=r"bucket_cap_mb=.*(Allowed|holds no capacity)"):
        Plan(bucket_cap_mb=cap)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("zip", {}, "comm_hook='zip' is not known. Allowed: 'none', 'fp16', 'bf16', 'powersgd', or a callable"),
        (None, {}, "comm_hook=None is not known"),
        (["bf16"], {}, "is not known"),
        ("bf16", {"rank": 2}, "hook 'bf16' has no option 'rank'. Its options: none at all"),
        ("powersgd", {"rank": 2}, "has no option 'rank'. Its options: matrix_approximation_rank"),
        ("powersgd", {"matrix_approximation_rank": 0}, "whole number of at least 1"),
        ("powersgd", {"start_powerSGD_iter": 10**400}, "below 2..63"),
        ("powersgd", {"min_compression_rate": 10**400}, "below 2..63"),
        ("custom", 5, "must be a mapping"),
        ("powersgd", {"matrix_approximation_rank": True}, "whole number of at least 1"),
        ("powersgd", {"matrix_approximation_rank": 1.5}, "whole number of at least 1"),
        ("powersgd", {"matrix_approximation_rank": "4"}, "whole number of at least 1"),
        ("powersgd", {"start_powerSGD_iter": -1}, "whole number of at least 0"),
        ("powersgd", {"min_compression_rate": float("nan")}, "finite number of at least 0"),
        ("powersgd", {"use_error_feedback": 1}, "must be true or false"),
        ("powersgd", [1], "must be a mapping"),
    ],
)
def test_hooks_and_options_that_do_not_exist_are_refused(name: object, options: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HookSpec(name, options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema must be 1, got 2"),
        ({"schema": True}, "schema must be 1, got True"),
        ({"hook": {"name": "custom", "options": None}}, "must be a mapping"),
        ({"static": True}, "no field 'static'. Its fields: static_graph"),
        ({"static_graph": 1}, "static_graph=1 must be True or False"),
        ({"hook": "bf16"}, "hook='bf16' of a plan must be a mapping"),
        ({"hook": {"name": "bf16", "level": 2}}, "must be a mapping with 'name'"),
        ({"bucket_cap_mb": "25"}, "bucket_cap_mb='25'"),
    ],
)
def test_what_is_not_a_plan_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_dict(Plan().to_dict() | change)


def test_a_file_that_holds_no_plan_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"absent\.json"):
        Plan.load(tmp_path / "absent.json")
    (tmp_path / "torn.json").write_text('{"schema": 1, ')
    with pytest.raises(ValueError, match=r"torn\.json"):
        Plan.load(tmp_path / "torn.json")
    (tmp_path / "list.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match=r"list\.json.*not a plan"):
        Plan.load(tmp_path / "list.json")


def test_a_saved_plan_loads(tmp_path) -> None:
    plan = Plan(True, True, [0.5, 3], HookSpec("bf16"))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
