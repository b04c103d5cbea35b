"""A model that is worth tuning, trained with and without: what the tests of tuning share."""

from typing import Any

import numpy as np
import pytest
from ranks import Ranks
from scenarios import Messages, Wide, assert_ranks_equal, train

NO_CACHE = {"tuning": {"cache": False}}


def tune(arguments: dict[str, Any], steps: int = 80, **settings: Any) -> dict[str, Any]:
    """Train a model that can be tuned; also what was said."""
    messages = Messages()
    result = train(arguments, steps=steps, make_module=Wide, **settings)
    messages.close()
    return result | {"said": messages.texts}


@pytest.fixture(scope="module")
def stock(two_ranks: Ranks) -> dict[int, dict[str, Any]]:
    return {steps: two_ranks(train, None, steps=steps, make_module=Wide)[0] for steps in (10, 20, 30, 80)}


def assert_same_parameters(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    assert_ranks_equal(results)
    for name, array in expected["state"].items():
        np.testing.assert_array_equal(results[0]["state"][name], array, err_msg=name)
