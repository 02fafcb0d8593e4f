"""What the weight holder keeps in the object store of its node."""

from collections.abc import Sequence

from ray import serve

from actors.protocol import HeldImage
from serve_app.weights.holders import HOLDER_APP, HOLDER_DEPLOYMENT


async def held_images() -> Sequence[HeldImage]:
    """Ask the deployment, which is the holder of one node. It answers when it has brought torch in.

    Raises:
        Exception: there is no holder, or it is dead.
    """
    handle = serve.get_deployment_handle(HOLDER_DEPLOYMENT, HOLDER_APP)
    images: Sequence[HeldImage] = await handle.stats.remote()
    return images
