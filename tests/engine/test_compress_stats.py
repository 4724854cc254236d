"""`stats()` of compressed synchronization: what was claimed, how it travelled, and what it did to the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compress_cases import EVERY, SHAPES, Given, attached, backward, brings

import gradsync as gs
from gradsync.compress.param import Param
from gradsync.compress.recipe import Choice

Stats = dict[str, Any]


def stats_of(names: list[str], steps: int, **plan: Any) -> dict[str, Stats]:
    found = {}
    for name in names:
        model = Given(brings(0))
        with attached(model, EVERY[name], **plan) as sync:
            for step in range(steps):
                backward(model, brings(step))
            found[name] = sync.stats()
    return found


def audited(names: list[str], steps: int, audit_every: int) -> dict[str, Stats]:
    return stats_of(names, steps, audit_every=audit_every)


def claims(name: str) -> dict[str, tuple[int, int]]:
    """By label: the bytes of gradients that are compressed by it, and those of their payloads."""
    found: dict[str, tuple[int, int]] = {}
    for param, shape in SHAPES.items():
        it = Param(f"weights.{param}", shape)
        choice: Choice = EVERY[name].choose(it)
        if choice.codec is not None:
            raw, payload = found.get(choice.label, (0, 0))
            found[choice.label] = (raw + it.nbytes, payload + choice.nbytes(it))
    return found


def test_every_label_has_its_claimed_ratio_its_way_and_its_times(run: Callable[..., Any]) -> None:
    names = [name for name in EVERY if name != "across_hosts"]
    for found in run(stats_of, names, 5):
        for name, stats in found.items():
            labels = {key.partition(".")[0] for key in stats if "." in key}
            assert labels == set(claims(name)), name
            for label, (raw, payload) in claims(name).items():
                assert stats[f"{label}.ratio"] == pytest.approx(raw / payload, rel=1e-12), name
                in_blocks = label in ("int8", "int4", "sign", "topk")
                assert stats[f"{label}.way"] == ("gather" if in_blocks else "shared_memory"), name
                assert stats[f"{label}.sent_nbytes"] == 0, "nothing leaves the host"
                assert stats[f"{label}.encode_s"] > 0, name
                assert stats[f"{label}.decode_s"] > 0, name
            assert "audit_error" not in stats


def test_what_is_exact_on_one_host_has_no_account(run: Callable[..., Any]) -> None:
    for found in run(stats_of, ["across_hosts"], 3):
        assert not [key for key in found["across_hosts"] if "." in key]


def test_an_audit_tells_how_far_the_average_is_from_the_exact_one(run: Callable[..., Any]) -> None:
    for found in run(audited, ["bf16", "int8", "sign", "topk", "powersgd"], 6, 2, ranks=3):
        assert {stats["audit_step"] for stats in found.values()} == {4}
        assert 0 < found["bf16"]["audit_error"] < 2**-7
        assert found["bf16"]["audit_cosine"] == pytest.approx(1, abs=1e-4)
        assert 0 < found["int8"]["audit_error"] < 0.05
        # One bit for each element, and what waited before: far off, and yet the same way.
        assert 0.2 < found["sign"]["audit_error"] < 2
        assert 0.3 < found["sign"]["audit_cosine"] < 0.95
        for name in ("topk", "powersgd"):
            assert 0 < found[name]["audit_cosine"] < 1


def audit_changes_nothing(names: list[str]) -> None:
    for name in names:
        averages = []
        for audit_every in (None, 1):
            model = Given(brings(0))
            with attached(model, EVERY[name], audit_every=audit_every):
                for step in range(4):
                    grads = backward(model, brings(step))
            averages.append(grads)
        for param in SHAPES:
            assert torch.equal(averages[0][param], averages[1][param]), f"{name} {param}"


def test_an_audit_changes_nothing(run: Callable[..., Any]) -> None:
    run(audit_changes_nothing, ["int8", "randomk", "powersgd", "by_parameter"])


def audit_a_nan() -> tuple[Any, Any]:
    model = Given(brings(0))
    with attached(model, gs.int8(), audit_every=1) as sync:
        for step in range(2):
            grads = brings(step)
            grads["first"][0, 0] *= torch.nan if step else 1
            backward(model, grads)
        return sync.stats()["audit_error"], sync.stats()["audit_cosine"]


def test_an_audit_of_nan_says_nothing(run: Callable[..., Any]) -> None:
    assert run(audit_a_nan) == [(None, None)] * 2
