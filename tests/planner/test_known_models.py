"""Known models: their totals are the published ones, and images cost what the layers multiply."""

from __future__ import annotations

import pytest

from gradsync.planner.known_models import ARCHITECTURES, architecture, find


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("llama2-7b", 6_738_415_616),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("mistral-7b", 7_241_732_096),
        ("bert-base", 109_482_240),
        ("bert-large", 335_141_888),
        ("resnet50", 25_557_032),
        ("vit-b16", 86_567_656),
    ],
)
def test_the_number_of_parameters_is_the_published_one(name: str, num_params: int) -> None:
    assert architecture(name).num_params == num_params


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_a_profile_of_hundreds_of_gradients(name: str) -> None:
    profile = architecture(name)
    assert 100 < len(profile.gradients) < 1000
    assert len({g.name for g in profile.gradients}) == len(profile.gradients)
    assert profile.gradients[-1].ready_s <= profile.backward_s * (1 + 1e-9)
    assert profile.gradients[-1].ready_s >= profile.backward_s * 0.9
    assert (profile.name, profile.source) == (name, "described")


def test_a_token_costs_six_operations_per_parameter() -> None:
    profile = architecture("gpt2", tokens=1000, flops=1e12, mfu=0.5)
    assert profile.compute_s == pytest.approx(6 * 124_439_808 * 1000 / 0.5e12)


@pytest.mark.parametrize(("name", "billions"), [("resnet50", 4.09), ("vit-b16", 17.56)])
def test_an_image_costs_what_is_published(name: str, billions: float) -> None:
    """Multiply-adds of one forward pass, as torchvision lists them; a step is three times that, of two operations."""
    profile = architecture(name, tokens=1, flops=1e9, mfu=1.0)
    assert profile.compute_s == pytest.approx(6 * billions, rel=0.01)


def test_images_and_tokens_have_their_own_usual_batch() -> None:
    assert architecture("resnet50").tokens == 64
    assert architecture("bert-base").tokens == 8192


def test_an_own_head_is_ready_first_and_a_tied_one_with_the_embedding() -> None:
    own, tied = architecture("llama3-8b"), architecture("gpt2")
    assert own.gradients[0].name == "lm_head.weight"
    assert 0 < own.gradients[0].ready_s < 0.1 * own.backward_s
    assert tied.gradients[0].ready_s > 0.25 * tied.backward_s  # the head's share of the work, before any gradient
    assert tied.gradients[-1].name == "wte.weight"


def test_early_layers_of_a_resnet_work_long_on_few_parameters() -> None:
    """Half of the parameters are ready after less than half of backward."""
    profile = architecture("resnet50")
    seen = 0
    for gradient in profile.gradients:
        seen += gradient.nbytes
        if seen >= profile.nbytes / 2:
            break
    assert gradient.ready_s < 0.2 * profile.backward_s


def test_an_unknown_name_is_answered_with_the_near_ones() -> None:
    with pytest.raises(ValueError, match="there is no architecture 'GPT-2', did you mean gpt2"):
        find("GPT-2")
    with pytest.raises(
        ValueError, match=r"there is no architecture 'zzz': there are gpt2, .*describe it by its number"
    ):
        architecture("zzz")
