"""What differs between the hubs, and what they have to say in the same words."""

from typing import Protocol

from actors.checkpoints.errors import AccessDenied, HubUnreachable, NotOnHub
from actors.checkpoints.hubs.network import route_to
from actors.checkpoints.plan import DownloadRequest, Listing, Plan
from actors.checkpoints.progress import Tracker
from actors.checkpoints.source import Hub

ENDPOINT_VARIABLES = {Hub.MODELSCOPE: "MODELSCOPE_ENDPOINT", Hub.HUGGINGFACE: "HF_ENDPOINT"}


class HubClient(Protocol):
    """One hub. The variables are names in the environment, for messages."""

    title: str
    endpoint: str
    endpoint_variable: str
    token_variable: str

    def list_files(self, request: DownloadRequest) -> Listing:
        """The files of the requested revision.

        Raises:
            DownloadError: unknown model or revision, no access, no network.
        """

    def fetch(
        self, request: DownloadRequest, plan: Plan, tracker: Tracker
    ) -> dict[str, BaseException]:
        """Bring every file of the plan, verified, into its directory; continue partial ones.

        Returns:
            path -> error of the files that did not arrive; `CorruptFile` when one was removed.
        """


def no_model(request: DownloadRequest, client: HubClient) -> NotOnHub:
    other = Hub.HUGGINGFACE if request.hub is Hub.MODELSCOPE else Hub.MODELSCOPE
    return NotOnHub(
        f"{client.title} ({client.endpoint}) shows no {request.repo} {request.id}; check the spelling, try "
        f"--source {other.value}, or set {client.token_variable} if it is private"
    )


def no_revision(request: DownloadRequest, client: HubClient) -> NotOnHub:
    return NotOnHub(
        f"{request.id} on {client.title} has no revision {request.revision!r}; "
        "leave --revision out for the default one"
    )


def denied(request: DownloadRequest, client: HubClient, error: Exception) -> AccessDenied:
    return AccessDenied(
        f"{client.title} refuses {request.id}: {first_line(error)}; accept its terms on the "
        f"hub's page and set {client.token_variable}"
    )


def unreachable(
    request: DownloadRequest, client: HubClient, reason: str | Exception
) -> HubUnreachable:
    """For a hub that does not answer as it should, with every way out that the user has."""
    host, port, proxy = route_to(client.endpoint)
    via = f"the proxy {host}:{port} on the way to " if proxy else ""
    at = "" if proxy else f" at {host}:{port}"
    return HubUnreachable(
        f"no files from {via}{client.title}{at}: {first_line(reason)}\n"
        f"  retry:   {request.command()}\n"
        f"  mirror:  {client.endpoint_variable}=https://MIRROR (now {client.endpoint})\n"
        f"  proxy:   HTTPS_PROXY=http://HOST:PORT, NO_PROXY=HOST (now {proxy or 'none'})\n"
        "  no network: copy a checkpoint directory to this machine and configure\n"
        "           source: {hub: path, id: DIRECTORY}"
    )


def first_line(reason: object) -> str:
    """The first line of a reason's text, else its type."""
    return (str(reason).strip().splitlines() or [type(reason).__name__])[0]
