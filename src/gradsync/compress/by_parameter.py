"""Rules by parameter, as data, that say which gradients are compressed, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gradsync.compress.param import Param
from gradsync.compress.recipe import EXACT, Choice, Compressor, check_compressor, check_whole


@dataclass(frozen=True)
class Rule:
    """The rule that `rule()` makes: which parameters it is for, and how they are compressed."""

    pattern: str
    compress: Compressor | None
    min_numel: int = 0
    dims: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str) or not self.pattern or not self.pattern.isprintable():
            raise ValueError(
                f'rule: pattern must be a parameter\'s name with * and ? in it, as "*.bias", got {self.pattern!r}'
            )
        check_whole("rule: min_numel", self.min_numel, 0)
        if self.dims is not None:
            check_whole("rule: dims", self.dims, 0, 64)
        if self.dims == 0 and self.min_numel > 1:
            raise ValueError(
                f"rule: dims=0 means a single number, which min_numel={self.min_numel} excludes; leave out one of them"
            )
        if self.compress is not None:
            check_compressor("rule: compress must be None or", self.compress)

    def matches(self, param: Param) -> bool:
        return (
            param.numel >= self.min_numel
            and self.dims in (None, len(param.shape))
            and fnmatchcase(param.name, self.pattern)
        )

    def covers(self, other: Rule) -> bool:
        """Return whether nothing that `other` matches gets past this rule, as far as patterns can tell."""
        return (
            self.pattern in ("*", other.pattern)
            and self.min_numel <= other.min_numel
            and self.dims in (None, other.dims)
        )


@dataclass(frozen=True)
class ByParameter:
    """The recipe that `by_parameter()` makes: the rules in their order, and the default."""

    rules: tuple[Rule, ...]
    default: Compressor | None = None

    def __post_init__(self) -> None:
        if not self.rules:
            raise ValueError("by_parameter needs at least one rule, got none; without rules, plan compress=default")
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"by_parameter: a rule is made by gs.rule(pattern, compress=...), got {rule!r}")
        for number, rule in enumerate(self.rules):
            for earlier in self.rules[:number]:
                if earlier.covers(rule):
                    raise ValueError(
                        f"by_parameter: {rule} never matches, as {earlier} stands before it; swap them or leave it out"
                    )
        if self.default is not None:
            check_compressor("by_parameter: default must be None or", self.default)
            if self.rules[-1].covers(_ANY):
                raise ValueError(
                    f"by_parameter: the default {self.default} is never used, as {self.rules[-1]} matches all; "
                    "leave out one of them"
                )

    def choose(self, param: Param) -> Choice:
        compress = next((rule.compress for rule in self.rules if rule.matches(param)), self.default)
        return EXACT if compress is None else compress.choose(param)


def rule(pattern: str = "*", *, compress: Compressor | None, min_numel: int = 0, dims: int | None = None) -> Rule:
    """A rule for parameters whose name fits `pattern`, with `min_numel` elements or more and exactly `dims` dimensions.

    >>> rule("*.bias", compress=None).matches(Param("layers.0.bias", (10,)))
    True
    """
    return Rule(pattern, compress, min_numel, dims)


def by_parameter(
    rules: Sequence[Rule] | Mapping[str, Compressor | None], default: Compressor | None = None
) -> ByParameter:
    """The first rule that matches a parameter decides; if none does, `default`. None: as it is.

    Common practice: vectors (biases, norms) exactly, for they are small and sensitive; embeddings in 16 bits, for
    most of their rows are zero; large matrices by what saves most.

    >>> from gradsync.compress.cast import bf16
    >>> from gradsync.compress.powersgd import powersgd
    >>> recipe = by_parameter(
    ...     [
    ...         rule(dims=1, compress=None),
    ...         rule("*embed*", compress=bf16()),
    ...         rule(min_numel=10_000, compress=powersgd(rank=4)),
    ...     ],
    ...     default=bf16(),
    ... )
    >>> recipe.choose(Param("norm.weight", (512,))).label, recipe.choose(Param("head.weight", (512, 512))).label
    ('exact', 'powersgd')

    A mapping from patterns does where names are enough:

    >>> by_parameter({"*.bias": None}, default=bf16()).choose(Param("head.bias", (512,))).label
    'exact'
    """
    if isinstance(rules, Mapping):
        rules = [Rule(pattern, compress) for pattern, compress in rules.items()]
    if isinstance(rules, str) or not isinstance(rules, Sequence):
        raise TypeError(
            f"by_parameter: rules must be a list of gs.rule(...) or a dict from patterns to compressors, got {rules!r}"
        )
    return ByParameter(tuple(rules), default)


def idle_patterns(compressor: object, names: Sequence[str]) -> list[str]:
    """Patterns of rules, anywhere in a composition, that fit no name: misspelt, most likely.

    >>> idle_patterns(by_parameter({"*.bais": None}), ["layers.0.bias"])
    ['*.bais']
    """
    if isinstance(compressor, ByParameter):
        idle = [rule.pattern for rule in compressor.rules if not any(fnmatchcase(n, rule.pattern) for n in names)]
        inside = [rule.compress for rule in compressor.rules] + [compressor.default]
        return idle + [pattern for inner in inside for pattern in idle_patterns(inner, names)]
    inner = getattr(compressor, "inner", None)
    return [] if inner is None else idle_patterns(inner, names)


_ANY = Rule("*", None)
