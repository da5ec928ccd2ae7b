"""What a step says of the host's verdicts, against sums by hand."""

import numpy as np
import pytest

from slpo_jax.evaluation.curves import SHARED
from slpo_jax.rewards.reward import Verdicts
from slpo_jax.rewards.unjudged import Unjudged
from slpo_jax.runtime.mesh import shard_rows
from slpo_jax.training.host_rewards import HostVerdicts
from slpo_jax.training.metrics import CLOCK
from small_steps import layout_of

FIRST = np.array([[1.0, 0, 0], [0.5, 0.5, 0.5], [2, 1, 0], [0, 0, 0]])
SECOND = np.arange(12.0).reshape(4, 3)
FAILED = SECOND % 4 == 1


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("names", "way"),
    [(("a", "b"), ("lowest",)), (("a",), ("value", -7.0)), (("a",), ("masked",))],
)
def test_metrics_are_of_all_verdicts_of_a_step(devices, names, way):
    """Of two batches, as where groups are drawn; a prompt is solved by the first reward, whatever the total."""

    def host(tokens_NA, index_N, latents_N):
        assert latents_N.tolist() == tokens_NA[:, 0].tolist()
        row = index_N
        column = tokens_NA[:, 0] % 3
        by_name = {
            name: each[row, column]
            for name, each in zip(names, (FIRST, SECOND), strict=False)
        }
        failed = FAILED[row, column]
        missing = SECOND[row, column] == 6
        total = np.where(failed, 0, sum(by_name.values()) - 1.25)
        by_name = {
            name: np.where(missing, np.nan, each) for name, each in by_name.items()
        }
        return Verdicts(
            total, by_name, FIRST[row, column] >= 1, failed, missing, failed & missing
        )

    layout = layout_of(devices)
    rule = Unjudged(*way)
    asked = HostVerdicts(host, layout.mesh, rule)
    index_B = np.arange(4)
    place = shard_rows((np.arange(12)[:, None], index_B, np.arange(12)), layout.mesh)
    wanted = FIRST + (SECOND if len(names) > 1 else 0) - 1.25
    # The lowest of the judged is below 0, whichever device it is on.
    others = FAILED if way[0] == "lowest" else FAILED | (SECOND == 6)
    wanted = np.where(
        others,
        {"lowest": wanted[~FAILED].min(), "value": -7.0, "masked": np.nan}[way[0]],
        wanted,
    )

    def step(state, batch):
        for _ in range(2):
            found = asked.ask(*batch)
        np.testing.assert_allclose(found, wanted)
        return state, {"reward": 1.0, "solved": 0.0, "counts": {"reward": 24.0}}

    _, metrics = asked.with_metrics(step)(None, place)
    given = SECOND != 6
    expected = {
        "reward": 1.0,
        "unjudged": FAILED.mean(),
        "reward_failed": 0.0,
        "solved": 0.5,
    }
    several = (
        {"reward/a": FIRST[given].mean(), "reward/b": SECOND[given].mean()}
        if len(names) > 1
        else {}
    )
    counts = metrics.pop("counts")
    assert 0 <= metrics.pop("verifier_seconds") < 1
    assert metrics == pytest.approx(expected | several)
    every = dict.fromkeys(("reward", "unjudged", "reward_failed"), 24)
    assert counts == every | {"solved": 8} | dict.fromkeys(several, 22)
    assert {"verifier_seconds", "verifier_share"} <= {*CLOCK} & {*SHARED}
