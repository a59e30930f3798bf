"""The error tree of ModuleLens. Every message names the value, the path or fqn, and the next step.

    ModuleLensError                    code, message, hint, did_you_mean, exit_code
    |- UsageError            2         an argument cannot be used as given
    |- NotFound              3         no such entry, module, call, blob, or command
    |- CheckFailed           4         a comparison or a verification failed
    |- EnvironmentLacks      5         a package, class, device or disk space is missing here
    |  |- ClassNotFound                the captured class cannot be imported here
    |  |- NotRebuildable               this module cannot be rebuilt, for a named reason
    |  |- DiskFull                     no space left while writing an entry
    |  `- PermissionDenied             the remote does not let you; trying again changes nothing
    |- Conflict              6         somebody else holds or changed what this needs
    |- TimedOut              7         foreign code did not end in time
    |  `- Unavailable                  the remote did not answer, or said later; try again
    |- ForeignError          4         code of the user's failed; its type and traceback come along
    |  |- CandidateBroken              the candidate's file cannot be imported
    |  `- WorkerCrashed                the process that ran it died: a signal, an exit, no memory
    `- RepoError             1         the repo on disk is not what it should be
       |- Corrupted                    bytes differ from their digest, or a file is cut off
       |- SchemaTooNew                 written by a newer ModuleLens
       `- NotARepo                     the path is a file, or a folder that is something else

The numbers are the exit codes of the command line.
"""

from __future__ import annotations

from collections.abc import Sequence


def text_of(error: object) -> str:
    """What an exception, or any object, says: foreign code, which may give what UTF-8 has not."""
    try:
        text = str(error)
    except Exception as failed:  # noqa: BLE001 - boundary: the user's `__str__`
        text = f"(its text cannot be had: {type(failed).__name__})"
    return text.encode(errors="backslashreplace").decode()


class ModuleLensError(Exception):
    """Base of all errors that ModuleLens raises on purpose.

    Args:
        message: What happened, with the value and the fqn or path it happened to.
        hint: What to do next; a command where there is one.
        did_you_mean: Names close to the one that was not found, best first.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "", did_you_mean: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.did_you_mean = tuple(did_you_mean)

    @property
    def code(self) -> str:
        """The error's stable name in JSON output, such as `NOT_FOUND`."""
        name = type(self).__name__
        return "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(name)).upper()

    def __str__(self) -> str:
        text = self.message
        if self.did_you_mean:
            text += f" (did you mean {', '.join(map(repr, self.did_you_mean))}?)"
        return f"{text}\n  hint: {self.hint}" if self.hint else text


class UsageError(ModuleLensError):
    """An argument cannot be used as given."""

    exit_code = 2


class NotFound(ModuleLensError):
    """No such entry, module, call or blob."""

    exit_code = 3


class CheckFailed(ModuleLensError):
    """A comparison or verification failed."""

    exit_code = 4


class EnvironmentLacks(ModuleLensError):
    """A package, a class, a device or disk space is missing on this machine."""

    exit_code = 5


class ClassNotFound(EnvironmentLacks):
    """The captured class cannot be imported here, or is no `nn.Module`."""


class NotRebuildable(EnvironmentLacks):
    """The module or value cannot be rebuilt; `reason` is one of `records.Reason`."""

    def __init__(self, message: str, *, reason: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class DiskFull(EnvironmentLacks):
    """No space is left on the disk that holds the repo."""


class PermissionDenied(EnvironmentLacks):
    """The remote refused: no such key, or no right to do this. Trying again changes nothing."""


class Conflict(ModuleLensError):
    """Somebody else holds or changed what this needs."""

    exit_code = 6


class TimedOut(ModuleLensError):
    """Foreign code did not end within its time limit."""

    exit_code = 7


class Unavailable(TimedOut):
    """The remote did not answer, or asked to come later; `after_s` seconds where it said so."""

    def __init__(self, message: str, *, hint: str = "", after_s: float = 0.0) -> None:
        super().__init__(message, hint=hint)
        self.after_s = after_s


class ForeignError(ModuleLensError):
    """Code that is not ModuleLens' own failed. `kind` is its exception's class name."""

    exit_code = 4

    def __init__(
        self, message: str, *, kind: str = "", traceback: str = "", line: int = 0, hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind
        self.traceback = traceback
        self.line = line


class CandidateBroken(ForeignError):
    """The candidate's file has a syntax error, or raised while it was imported."""


class WorkerCrashed(ForeignError):
    """The process that ran foreign code died before it gave a result."""


class RepoError(ModuleLensError):
    """The repo on disk is not what it should be."""


class Corrupted(RepoError):
    """Bytes differ from their digest, or a file is cut off."""


class SchemaTooNew(RepoError):
    """Written by a newer ModuleLens."""


class NotARepo(RepoError):
    """The path is a file, or a folder that holds something else."""
