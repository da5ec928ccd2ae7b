"""What a step says of the host's verdicts, against sums by hand."""

import numpy as np
import pytest

from slpo_jax.evaluation.curves import SHARED
from slpo_jax.rewards.reward import Verdicts
from slpo_jax.runtime.mesh import shard_rows
from slpo_jax.training.host_rewards import HostVerdicts
from slpo_jax.training.metrics import CLOCK
from small_steps import layout_of

FIRST, SECOND = np.array([[1.0, 0, 0], [0.5, 0.5, 0.5], [2, 1, 0], [0, 0, 0]]), np.arange(12.0).reshape(4, 3)
FAILED = SECOND % 4 == 1


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("names", [("a", "b"), ("a",)])
def test_metrics_are_of_all_verdicts_of_a_step(devices, names):
    """Of two batches, as where groups are drawn; a prompt is solved by the first reward, whatever the total."""

    def host(tokens_NA, index_N):
        row, column = index_N, tokens_NA[:, 0] % 3
        by_name = {name: each[row, column] for name, each in zip(names, (FIRST, SECOND), strict=False)}
        return Verdicts(sum(by_name.values()) - 0.25, by_name, FAILED[row, column], 0.5)

    layout = layout_of(devices)
    asked, index_B = HostVerdicts(host, layout.mesh), np.arange(4)
    place = shard_rows((np.arange(12)[:, None], index_B), layout.mesh)

    def step(state, batch):
        for _ in range(2):
            found = asked.rewards(*batch)
        np.testing.assert_allclose(found, FIRST + (SECOND if len(names) > 1 else 0) - 0.25)
        return state, {"reward": 1.0, "solved": 0.0, "counts": {"reward": 24.0}}

    _, metrics = asked.with_metrics(step)(None, place)
    expected = {"reward": 1.0, "reward_failed": FAILED.mean(), "solved": 0.5, "verifier_seconds": 1.0 * devices}
    several = {"reward/a": FIRST.mean(), "reward/b": SECOND.mean()} if len(names) > 1 else {}
    counts = metrics.pop("counts")
    assert metrics == pytest.approx(expected | several)
    assert counts == {"reward": 24, "reward_failed": 24, "solved": 8} | dict.fromkeys(several, 24)
    assert {"verifier_seconds", "verifier_share"} <= {*CLOCK} & {*SHARED}
