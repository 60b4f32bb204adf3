"""Who may have the mesh changed over HTTP. Pure."""

from nodes.api_keys.entries import ApiKey
from nodes.gateway.config import GatewayConfig
from nodes.gateway.errors import Forbidden


def may_control(config: GatewayConfig, key: ApiKey | None) -> bool:
    return config.control and key is not None and key.admin


def check_control(config: GatewayConfig, key: ApiKey | None, what: str) -> None:
    """Raises Forbidden unless `key` may have done what is done to all who use the mesh."""
    if not config.control:
        # Any page in a browser can send a request to its own machine: a server without a flag for it must not obey.
        message = (
            f"{what} concerns everybody who uses this mesh, and its gateways were started without `--control`."
            " Its operator can make an admin key (`meshctl keys api NAME --admin --to FILE`), and start it with"
            " `meshctl up --control --api-key-file FILE`."
        )
        raise Forbidden(message, code="control_off")
    if not may_control(config, key):
        message = (
            f"{what} concerns everybody who uses this mesh, and needs an admin key: have its operator make one with"
            " `meshctl keys api NAME --admin --to FILE`."
        )
        raise Forbidden(message)
