"""Quantities mean what their letters say, and what has no meaning is refused in a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync import units

PARSERS: list[Callable[[str], float]] = [units.rate, units.count, units.seconds, units.nbytes]
positive = st.floats(1e-6, 1e15)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("100g", 12.5e9),
        ("100G", 12.5e9),
        ("100gbit", 12.5e9),
        ("100 Gbit/s", 12.5e9),
        ("100Gb/s", 12.5e9),
        ("100Gbps", 12.5e9),
        ("100GBit", 12.5e9),
        ("2.5gbit", 312.5e6),
        ("100mbit", 12.5e6),
        ("20m", 2.5e6),
        ("1e3bit/s", 125.0),
        ("12.5GB/s", 12.5e9),
        ("12.5gB/s", 12.5e9),
        ("900MB/s", 900e6),
        ("900MBps", 900e6),
        ("1MiB/s", 1048576.0),
        (" .5 g ", 62.5e6),
    ],
)
def test_a_small_b_is_a_bit_and_a_capital_one_a_byte(text: str, bytes_per_s: float) -> None:
    assert units.rate(text) == bytes_per_s


@pytest.mark.parametrize("text", ["100", "1e9", "100GB", "100gx", "fast", "100 g g", "1,5g", "g", "0g", "0GB/s"])
def test_what_is_no_rate_is_told_what_100g_means(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        units.rate(text)
    assert repr(text) in str(caught.value)
    assert "100g = 100 Gbit/s = 12.5 GB/s" in str(caught.value)
    assert "a capital B is a byte" in str(caught.value)


def test_an_amount_is_told_that_it_is_no_rate() -> None:
    with pytest.raises(ValueError, match=r"'100GB' is no rate \(an amount, not a rate: per second is missing\)"):
        units.rate("100GB")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1e9", 10**9),
        ("1b", 10**9),
        ("1.3B", 1_300_000_000),
        ("350m", 350_000_000),
        ("7k", 7000),
        ("1_000_000", 10**6),
        ("8192", 8192),
        ("1.5T", 1_500_000_000_000),
        ("1.1e3", 1100),
    ],
)
def test_counts_are_exact(text: str, number: int) -> None:
    assert units.count(text) == number


@pytest.mark.parametrize("text", ["0", "0.5", "1.5", "1e-3", "many", "1g", "1kb"])
def test_a_count_is_a_whole_number_from_one(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no count.*a whole number such as 8192, 7k, 350m, 1b or 1e9"):
        units.count(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [("5us", 5e-6), ("5µs", 5e-6), ("3ms", 3e-3), ("2s", 2.0), ("0s", 0.0), ("10min", 600.0), ("4h", 14400.0)],
)
def test_times_are_in_seconds(text: str, number: float) -> None:
    assert units.seconds(text) == number


@pytest.mark.parametrize("text", ["5", "5m", "5 seconds", "us"])
def test_a_time_needs_its_unit(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no time.*write 5us, 3ms, 2s, 10min or 4h"):
        units.seconds(text)


@pytest.mark.parametrize(("text", "number"), [("25MiB", 25 << 20), ("4MB", 4 * 10**6), ("4096B", 4096), ("1kB", 1000)])
def test_mebibytes_are_not_megabytes(text: str, number: int) -> None:
    assert units.nbytes(text) == number


@pytest.mark.parametrize("text", ["25", "25M", "4mb", "0B", "0.5B"])
def test_an_amount_without_a_byte_in_it_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no amount of bytes.*write 25MiB \(1024 x 1024 bytes\), 4MB"):
        units.nbytes(text)


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize(
    "value",
    [
        *("", " ", "nan", "inf", "-inf", "-1", "-5g", "-5s", "-5B", "1e999", "nang", "infs", "1e99999g", "9" * 5000),
        *("١g", None, 100, 1.5, True, b"1g", ["1g"]),
    ],
)
def test_nonsense_is_one_sentence(parse: Callable[[Any], float], value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        parse(value)
    sentence = str(caught.value)
    assert "is no" in sentence
    assert "write" in sentence
    assert "\n" not in sentence
    assert len(sentence) < 320


@pytest.mark.parametrize("parse", PARSERS)
@given(text=st.text(max_size=50))
def test_any_text_is_a_number_or_a_value_error(parse: Callable[[str], float], text: str) -> None:
    try:
        number = parse(text)
    except ValueError:
        return
    assert 0 <= number < math.inf


@given(number=positive)
def test_what_is_shown_reads_as_the_same_to_three_digits(number: float) -> None:
    assert units.rate(units.show_rate(number).replace(",", "")) == pytest.approx(number, rel=0.0051)
    assert units.rate(units.show_bits(number).replace(",", "")) == pytest.approx(number, rel=0.0051)
    assert units.seconds(units.show_seconds(number).replace(",", "")) == pytest.approx(number, rel=0.0051)


@given(number=st.integers(1, 10**14))
def test_amounts_that_are_shown_read_as_the_same_to_three_digits(number: int) -> None:
    shown = units.show_nbytes(number).replace(",", "")
    assert units.nbytes(shown) == pytest.approx(number, rel=0.0051)


def test_no_number_is_shown_as_a_thousand_of_a_unit_that_has_a_next() -> None:
    assert units.show_seconds(0.9999) == "1 s"
    assert units.show_rate(999.9e6) == "1 GB/s"
    assert units.show_count(999_999) == "1 million"
    assert units.show_count(999_499) == "999,499"
    assert units.show_seconds(0) == "0 ns"
