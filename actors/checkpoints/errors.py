"""Why a download did not happen. `str()` of each says what to do next, in one line or several.

DownloadError
  WrongRequest    InvalidModelId, NotOnHub, NothingSelected, DirectoryInUse
  FilesFailed     VerificationFailed, PartialDownload
  AccessDenied, HubUnreachable, NotEnoughDisk
"""


class DownloadError(Exception):
    """The directory is not complete."""


class WrongRequest(DownloadError):
    """What was asked for is wrong; the same call will fail again."""


class InvalidModelId(WrongRequest):
    """The id cannot be one of the hub's."""


class NotOnHub(WrongRequest):
    """The hub has no such model or revision, or does not show it to this caller."""


class NothingSelected(WrongRequest):
    """The patterns leave no file to download."""


class DirectoryInUse(WrongRequest):
    """The directory holds another model or revision."""


class AccessDenied(DownloadError):
    """The hub wants a token, or another one."""


class HubUnreachable(DownloadError):
    """No network, or none to the hub."""


class NotEnoughDisk(DownloadError):
    """The files do not fit; nothing was fetched."""


class FilesFailed(DownloadError):
    """Files did not arrive. `failed` maps each one's path to the reason."""

    def __init__(self, message: str, failed: dict[str, str]) -> None:
        super().__init__(message, failed)
        self.failed = failed

    def __str__(self) -> str:
        return str(self.args[0])


class VerificationFailed(FilesFailed):
    """Some files are not what the hub lists; those are gone from the directory."""


class PartialDownload(FilesFailed):
    """Some files arrived and are kept, others did not."""


class CorruptFile(Exception):
    """One whole file arrived, it is not what the hub lists, and it was removed."""
