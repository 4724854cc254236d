"""The right to make networks: whoever lacks it runs the command once more, in a user namespace where it has it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

from gradsync.cli.demo.slow_link import namespaces
from gradsync.cli.demo.slow_link.shaped_link import NoLink, Shaper, try_out
from gradsync.cli.shared import BadInput

_GRACE_S = 20.0  # to clean up after a signal
_COMMAND = "import sys; from gradsync.cli.main import main; sys.exit(main(sys.argv[1:]))"


def has_rights() -> bool:
    """Return whether this process may make networks."""
    if sys.platform != "linux":
        raise BadInput(
            f"gradsync demo: --slow-link needs network namespaces, which are Linux's; this is {sys.platform}"
        )
    return not namespaces.missing_capabilities()


def check_link(shaper: Shaper) -> None:
    """Refuse with a sentence where a process with all rights still cannot make such a link."""
    try:
        try_out(shaper)
    except NoLink as error:
        raise BadInput(f"gradsync demo: there can be no slow link here, {error}: load that module as root") from None
    except OSError as error:
        raise BadInput(f"gradsync demo: there can be no slow link here, {namespaces.explain(error)}") from None


def rerun(arguments: Sequence[str]) -> int:
    """Run `gradsync` with these arguments as root of a user namespace; its exit code."""
    inner = [sys.executable, "-c", _COMMAND, *arguments]
    # -I -S: nothing of the user's that could start a thread before the namespace is made.
    command = [sys.executable, "-I", "-S", namespaces.__file__, *inner]
    # In a session of its own it gets no Ctrl-C from the terminal, but one from here.
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait()
        return code if code >= 0 else 128 - code  # as shells say it
    except BaseException as error:
        process.send_signal(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
