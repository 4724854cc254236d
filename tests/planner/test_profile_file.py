"""A profile survives a file, and a wrong file is answered in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradsync.planner.known_models import architecture
from gradsync.planner.profile import Gradient, ModelProfile

SECONDS = st.floats(0, 1e6)
WORDS = st.text(st.characters(codec="utf-8"), max_size=20)
DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
GRADIENTS = st.lists(
    st.builds(Gradient, WORDS, st.lists(st.integers(0, 10**6), max_size=4).map(tuple), DTYPES, SECONDS), min_size=1
).map(lambda gradients: tuple(sorted(gradients, key=lambda gradient: gradient.ready_s)))
PROFILES = st.builds(
    ModelProfile,
    gradients=GRADIENTS,
    forward_s=SECONDS,
    backward_s=SECONDS,
    optimizer_s=SECONDS,
    input_s=SECONDS,
    tokens=st.floats(1e-3, 1e12) | st.integers(1, 10**9),
    jitter=st.none() | st.floats(0, 10),
    source=st.sampled_from(["measured", "described"]),
    name=WORDS,
    host_s=st.none() | SECONDS,
)

GOOD = """
forward_s = 0.1
backward_s = 0.2

[[gradients]]
name = "w"
shape = [10, 20]
dtype = "float32"
ready_s = 0.15
"""


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PROFILES)
def test_a_profile_comes_back_as_it_was(tmp_path: Path, profile: ModelProfile) -> None:
    path = tmp_path / "profile.toml"
    profile.save(path)
    assert ModelProfile.load(path) == profile


def test_a_described_model_comes_back_as_it_was(tmp_path: Path) -> None:
    profile = architecture("gpt2", memory_bandwidth=2e12)
    profile.save(tmp_path / "gpt2.toml")
    assert ModelProfile.load(tmp_path / "gpt2.toml") == profile


def test_what_a_file_leaves_out_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(GOOD)
    assert ModelProfile.load(path) == ModelProfile((Gradient("w", (10, 20), torch.float32, 0.15),), 0.1, 0.2)


@pytest.mark.parametrize(
    ("good", "wrong", "sentence"),
    [
        ("forward_s", "forwards_s", "unknown profile field 'forwards_s'; .*did you mean 'forward_s'"),
        ("forward_s = 0.1", "", "the field 'forward_s' is missing"),
        ("0.1", '"fast"', "forward_s must be a number, got 'fast'"),
        ("0.1", "-0.1", "forward_s must be a number of seconds, 0 or more, got -0.1"),
        ("0.1", "0.1\ntokens = 0", "tokens must be a positive number, got 0"),
        ("0.1", "0.1\njitter = -1", "jitter must be a relative deviation, 0 or more, got -1"),
        ("0.1", "0.1\nhost_s = -1", "host_s must be a number of seconds, 0 or more, got -1"),
        ("0.1", '0.1\nsource = "guessed"', 'source must be "measured" or "described", got \'guessed\''),
        ("0.1", "0.1\nname = 7", "name must be a word in quotes, got 7"),
        ("[[gradients]]", "[gradients]", r"gradients must be a list of tables, each under \[\[gradients\]\]"),
        ("ready_s", "ready", "gradient 0: unknown gradient field 'ready'"),
        ("ready_s = 0.15", "", "gradient 0: the field 'ready_s' is missing"),
        ("0.15", "nan", "gradient 0: ready_s must be a number of seconds since backward began, 0 or more, got nan"),
        ("0.15", "true", "gradient 0: ready_s must be a number of seconds"),
        ("[10, 20]", "[10, -20]", "gradient 0: shape must be a list of whole numbers, 0 or more, got"),
        ("[10, 20]", "200", "gradient 0: shape must be a list of whole numbers, 0 or more, got 200"),
        ("float32", "fp32", "dtype must be one of float16, bfloat16, float32, float64, got 'fp32'"),
        ("[[", "[[[", "is not a TOML file"),
    ],
)
def test_a_wrong_file_is_answered_in_a_sentence(tmp_path: Path, good: str, wrong: str, sentence: str) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(GOOD.replace(good, wrong, 1))
    with pytest.raises(ValueError, match=sentence) as caught:
        ModelProfile.load(path)
    assert str(caught.value).startswith(str(path))


def test_gradients_out_of_order_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(GOOD + GOOD[GOOD.index("[[") :].replace("0.15", "0.05"))
    with pytest.raises(ValueError, match="gradients must stand in the order in which they are ready"):
        ModelProfile.load(path)
