"""Which software serves which model, as answers say it."""

import hashlib
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from nodes.gateway.config import GatewayConfig


def server_version() -> str:
    """Of the installed distribution."""
    try:
        return installed_version("kvmesh")
    except PackageNotFoundError:
        return "0+unknown"


def fingerprint_of(config: GatewayConfig) -> str:
    """OpenAI's `system_fingerprint`: another one where software, model, context or rounding are others."""
    served = f"{config.model} {config.model_name} {config.context_length} {config.quantization}"
    return "fp_" + hashlib.sha256(f"{server_version()} {served}".encode()).hexdigest()[:10]
