"""A plan as data: it answers how gradients travel, how often, and when."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

from gradsync import tables
from gradsync.algorithms.builtin import Native, SharedMemory
from gradsync.algorithms.halving_doubling import HalvingDoubling
from gradsync.algorithms.hierarchical import Hierarchical
from gradsync.algorithms.price import Algorithm
from gradsync.algorithms.ring import Ring
from gradsync.algorithms.tree import Tree
from gradsync.compress import toml
from gradsync.compress.recipe import Compressor, check_compressor, hint_for
from gradsync.plan import paces
from gradsync.plan.pace_recipe import Pace, PaceRecipe, exchange_of
from gradsync.plan.paces import KINDS, every_step

Overlap = Literal["none", "backward"]
Combine = Literal["mean", "sum"]


# The names under which algorithms stand in a TOML file: `[algorithm] kind = "ring"`.
ALGORITHMS: dict[str, type] = {
    "native": Native,
    "ring": Ring,
    "tree": Tree,
    "halving_doubling": HalvingDoubling,
    "hierarchical": Hierarchical,
    "shared_memory": SharedMemory,
}


@dataclass(frozen=True)
class Plan:
    """A plan of how to synchronize. Frozen and checked; equal plans compare equal, also across ranks.

    Args:
        algorithm: Which way the bytes travel: `native()` (the process group's own all-reduce), `ring()`, `tree()`,
            `halving_doubling()`, `hierarchical()` or `shared_memory()`. None: the fastest for this group and size.
        compress: What travels: `fp16()`, `bf16()`, `int8()`, `int4()`, `sign()`, `topk(density)`, `randomk(density)`,
            `powersgd(rank)`, or one of these in `error_feedback(c)`, `warmup(c, steps)`, `by_parameter(rules)`,
            `across_hosts(c)`. None: gradients as they are.
        pace: How often, and how fresh: `every_step()`, `accumulate(k)`, `local_sgd(k)`, `diloco(k)`, `delayed(k)`,
            `async_sgd(max_staleness)` or `gossip()`.
        overlap: When. "backward": while backward still computes. "none": after it.
        bucket_bytes: How much travels in one message. None: an eighth of the model, 4 to 25 MiB.
        combine: "mean" or "sum" over the ranks.
        audit_every: Compare what compression delivers with the exact average once in so many synchronizations.
            None: never.

    >>> Plan(pace=paces.accumulate(4), bucket_bytes=1 << 20).pace
    Accumulate(k=4, backwards=1)
    """

    algorithm: Algorithm | None = None
    compress: Compressor | None = None
    pace: Pace = field(default_factory=every_step)
    overlap: Overlap = "backward"
    bucket_bytes: int | None = None
    combine: Combine = "mean"
    audit_every: int | None = None

    def __post_init__(self) -> None:
        check_algorithm(self.algorithm)
        check_compress(self.compress)
        if not _is_pace(self.pace):
            names = ", ".join(f"gs.{name}(...)" for name in KINDS)
            raise TypeError(f"pace must be one of {names}, got {self.pace!r}{_meant_pace(self.pace)}")
        if self.overlap not in get_args(Overlap):
            wish = " (overlap with the next forward is not built yet)" if str(self.overlap) == "forward" else ""
            raise ValueError(f'overlap must be "none" or "backward", got {self.overlap!r}{wish}')
        if self.combine not in get_args(Combine):
            raise ValueError(f'combine must be "mean" or "sum", got {self.combine!r}')
        if self.bucket_bytes is not None:
            if not _is_int(self.bucket_bytes):
                raise TypeError(f"bucket_bytes must be a whole number or None, got {self.bucket_bytes!r}")
            if self.bucket_bytes < 1024:
                raise ValueError(f"bucket_bytes must be at least 1024, got {self.bucket_bytes} (bytes, not megabytes)")
        if self.audit_every is not None:
            if not _is_int(self.audit_every) or self.audit_every < 1:
                raise ValueError(
                    f"audit_every must be None or a whole number of at least 1, got {self.audit_every!r} "
                    "(100: once in a hundred synchronizations)"
                )
            if self.compress is None:
                raise ValueError(
                    f"audit_every={self.audit_every} measures what compression loses, but compress is None; "
                    "leave it out, or say what compresses: compress=gs.int8()"
                )

        self._check_combination()

    def _check_combination(self) -> None:
        """Refuse what makes no sense together."""
        name, exchange = paces.kind_of(self.pace), exchange_of(self.pace)
        if self.combine == "sum" and not exchange.of_gradients:
            raise ValueError(f'combine="sum" adds gradients up, but {name} keeps parameters: use combine="mean"')
        if not exchange.all_reduces:
            for field_name in ("algorithm", "compress"):
                if getattr(self, field_name) is not None:
                    raise ValueError(
                        f"{name} sends from rank to rank and has no all-reduce to choose or to compress, "
                        f"got {field_name}={getattr(self, field_name)!r}; leave it out"
                    )

    def canonical(self) -> dict[str, Any]:
        """Plain data that says the same: what ranks compare and what a file holds."""
        table: dict[str, Any] = {
            "pace": paces.canonical(self.pace),
            "overlap": self.overlap,
            "combine": self.combine,
        }
        if self.algorithm is not None:
            table["algorithm"] = _recipe(self.algorithm, ALGORITHMS)
        if self.compress is not None:
            table["compress"] = toml.canonical(self.compress)
        if self.bucket_bytes is not None:
            table["bucket_bytes"] = self.bucket_bytes
        if self.audit_every is not None:
            table["audit_every"] = self.audit_every
        return table

    def save(self, path: str | Path) -> None:
        """Write the plan as TOML."""
        table = self.canonical()
        known = (*KINDS, *ALGORITHMS, *toml.MAKERS, toml.EXACTLY)
        if outside := sorted(set(tables.kinds(table)) - set(known)):
            raise ValueError(
                f"{' and '.join(outside)} in this plan is from outside of gradsync, and no file can make it again; "
                "keep the plan in Python"
            )
        tables.write(path, "A gradsync plan: gs.attach(model, opt, gs.Plan.load(path))", table)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from TOML."""
        return cls.from_canonical(tables.read(path), str(path))

    @classmethod
    def from_canonical(cls, table: dict[str, Any], where: str = "plan") -> Plan:
        """The plan that plain data stands for; `where` it stands is told in errors.

        >>> Plan.from_canonical(Plan(pace=paces.accumulate(4)).canonical()) == Plan(pace=paces.accumulate(4))
        True
        """
        table = dict(tables.check_fields(where, "plan", table, [f.name for f in dataclasses.fields(cls)]))
        if "algorithm" in table:
            table["algorithm"] = _from_recipe(where, "algorithm", table["algorithm"], ALGORITHMS, _make_algorithm)
        if "pace" in table:
            table["pace"] = _from_recipe(where, "pace", table["pace"], KINDS, paces.from_canonical)
        try:
            if "compress" in table:
                table["compress"] = toml.from_canonical(table["compress"])
            return cls(**table)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from None


def not_a_plan(value: object) -> str:
    """Say what is wrong to who passed something else, a compressor most likely.

    >>> not_a_plan(3)
    'plan must be a gs.Plan, got 3'
    """
    hint = hint_for(value)
    if isinstance(value, Algorithm) and not isinstance(value, type):
        hint = " (did you mean gs.Plan(algorithm=...)?)"
    elif _is_pace(value):
        hint = " (did you mean gs.Plan(pace=...)?)"
    elif isinstance(value, str | PathLike):
        hint = f" (did you mean gs.Plan.load({str(value)!r})?)"
    elif value is Plan:
        hint = " (did you mean gs.Plan()?)"
    elif isinstance(value, dict):
        hint = " (did you mean gs.Plan(**...)?)"
    return f"plan must be a gs.Plan, got {value!r}{hint}"


def _meant_pace(value: object) -> str:
    """
    >>> _meant_pace(4), _meant_pace("local_sgd"), _meant_pace(None)
    (' (did you mean gs.accumulate(4)?)', ' (did you mean gs.local_sgd(...)?)', '')
    """
    if _is_int(value):
        return f" (did you mean gs.accumulate({value})?)"
    begins = getattr(value, "open", None)
    if callable(begins) and begins is not PaceRecipe.open:
        return "; a pace of your own is a frozen dataclass with steps and open(context)"
    name = value if isinstance(value, str) else getattr(value, "__name__", None)
    return f" (did you mean gs.{name}(...)?)" if isinstance(name, str) and name in KINDS else ""


def check_algorithm(algorithm: object) -> None:
    """Refuse what is none."""
    if algorithm is not None and not (isinstance(algorithm, Algorithm) and tables.is_comparable(algorithm)):
        names = ", ".join(f"gs.{name}()" for name in ALGORITHMS)
        meant = algorithm if isinstance(algorithm, str) else getattr(algorithm, "__name__", None)
        hint = f" (did you mean gs.{meant}()?)" if isinstance(meant, str) and meant in ALGORITHMS else ""
        raise TypeError(f"algorithm must be None or one of {names}, got {algorithm!r}{hint}")


def check_compress(compress: object) -> None:
    """Refuse what is none, and what two ranks could not compare."""
    if compress is not None:
        check_compressor("compress must be None or", compress)
        toml.canonical(compress)


def _is_pace(value: object) -> bool:
    return isinstance(value, Pace) and tables.is_comparable(value)


def _recipe(value: Any, kinds: dict[str, type]) -> dict[str, Any]:
    kind = next((name for name, cls in kinds.items() if isinstance(value, cls)), type(value).__name__)
    return {"kind": kind, **dataclasses.asdict(value)}


def _make_algorithm(kind: str, arguments: dict[str, Any]) -> Algorithm:
    made: Algorithm = ALGORITHMS[kind](**arguments)
    return made


def _from_recipe(
    path: str | Path, key: str, recipe: Any, kinds: dict[str, type], make: Callable[[str, dict[str, Any]], Any]
) -> Any:
    if not isinstance(recipe, dict) or recipe.get("kind") not in list(kinds):
        raise ValueError(
            f"{path}: [{key}] needs a kind, one of {', '.join(kinds)}, got {recipe!r}; "
            f'write a table: [{key}] and below it kind = "{next(iter(kinds))}"'
        )
    arguments = {name: value for name, value in recipe.items() if name != "kind"}
    try:
        tables.check_arguments(f"[{key}]", recipe["kind"], kinds[recipe["kind"]], arguments)
        return make(recipe["kind"], arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


__all__ = [
    "Combine",
    "Overlap",
    "Plan",
    "check_algorithm",
    "check_compress",
    "not_a_plan",
]
