"""What a `UserError` has beside its line, and what keys are called in it."""

import pickle

import pytest

from slpo_jax.api.load_options import by_argument
from slpo_jax.errors import SaveError, UserError, about, key_name


def test_a_line_has_the_key_and_the_problem_where_they_are_given():
    error = UserError("config.base", "not set; give one")
    assert str(error) == "config.base: not set; give one"
    assert (error.key, error.problem) == ("config.base", "not set; give one")
    whole = SaveError("x.json: no such file; check the path")
    assert (str(whole), whole.key, whole.problem) == (str(whole), "", str(whole))
    again = pickle.loads(pickle.dumps(error))  # as another process raises it
    assert (str(again), again.key, again.problem) == (
        str(error),
        error.key,
        error.problem,
    )


@pytest.mark.parametrize(
    ("key", "name"),
    [("config.latent_policy.name", "latent_policy"), ("--latents", "latents"), ("config.init", "checkpoint"),
     ("--workdir", "--workdir"), ("config.model", "config.model")],
)  # fmt: skip
def test_a_key_is_called_what_the_user_gives(key, name):
    with pytest.raises(UserError) as inner, by_argument(), about("question"):
        raise UserError(key, f"or {key_name(key)}")
    assert str(inner.value) == f"question: {name}: or {name}"
    assert key_name(key) == key  # outside again, also after an error
    assert str(UserError(key, "no")) == f"{key}: no"
