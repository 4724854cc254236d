"""Threads that sum at once see a whole choice of the instruction set: ThreadSanitizer finds no race in sums.c."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import gradsync.kernels

_NATIVE = Path(gradsync.kernels.__file__).with_name("native")
_THREADS_THAT_ASK = """
#include <pthread.h>
#include <string.h>
#include "sums.h"
void gradsync_sum(const void *const *in, int num_in, void *const *out, int num_out, uint64_t count, int dtype,
                  double scale);
static void *ask(void *unused) {
    float one = 1.0f, two = 2.0f, total;
    const void *in[2] = {&one, &two};
    void *out[1] = {&total};
    gradsync_sum(in, 2, out, 1, 1, F32, 1.0);
    return total == 3.0f && *gradsync_level() ? unused : NULL;
}
int main(void) {
    pthread_t threads[8];
    int right = 0;
    void *answer;
    for (int i = 0; i < 8; i++) pthread_create(&threads[i], NULL, ask, threads);
    for (int i = 0; i < 8; i++) right += !pthread_join(threads[i], &answer) && answer != NULL;
    return right == 8 ? 0 : 1;
}
"""


def test_a_choice_is_published_whole(tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not _NATIVE.is_dir():
        pytest.skip("needs a C compiler and the sources")
    (tmp_path / "ask.c").write_text(_THREADS_THAT_ASK)
    program = tmp_path / "ask"
    flags = ["-std=gnu11", "-O1", "-pthread", "-ffp-contract=off", f"-I{_NATIVE}"]
    sources = [str(tmp_path / "ask.c"), str(_NATIVE / "sums.c")]
    built = [compiler, *flags, "-fsanitize=thread", *sources, "-o", str(program), "-lm"]
    made = subprocess.run(built, capture_output=True, text=True, timeout=60)
    if made.returncode:
        pytest.skip(f"needs ThreadSanitizer: {made.stderr[-200:]}")
    ended = subprocess.run([program], capture_output=True, text=True, timeout=30)
    if "unexpected memory mapping" in ended.stderr:
        pytest.skip("ThreadSanitizer cannot run under this kernel's address randomization")
    assert ended.returncode == 0, ended.stderr
