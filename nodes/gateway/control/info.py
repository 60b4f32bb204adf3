"""What SGLang's routes say of a server: its model, its weights, its shape, its load. Pure."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from mesh.membership.view import Member
from nodes.gateway.config import GatewayConfig
from nodes.gateway.control.load import Load
from nodes.gateway.surfaces.generate.answer import WEIGHT_VERSION
from nodes.roles import WORKER


class WeightVersion(Struct, frozen=True, kw_only=True):
    """Answer of GET /weight_version."""

    weight_version: str = WEIGHT_VERSION


class ModelInfo(Struct, frozen=True, kw_only=True):
    """Answer of GET /model_info."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool
    preferred_sampling_params: dict[str, Any] | None = None
    weight_version: str = WEIGHT_VERSION
    has_image_understanding: bool = False
    has_audio_understanding: bool = False


class LoadOfRank(Struct, frozen=True):
    """The requests of a mesh, as one rank of SGLang's."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    dp_rank: int = 0


class TokensOfRank(Struct, frozen=True):
    """One of the list that GET /get_load answers: routers balance by the sum of `num_tokens`."""

    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int
    dp_rank: int = 0


class ServerInfo(ModelInfo, frozen=True, kw_only=True):
    """Answer of GET /server_info: what trainers read of SGLang's settings, as far as a mesh has them.

    `tp_size` are the ranks of the largest group. Groups are this server's own affair, and so are prefill and decode
    apart: it is one server without ranks that a router would address by their numbers (`dp_size`), and none of two
    halves that a router would join (`disaggregation_mode`).
    """

    host: str
    port: int
    context_length: int
    tp_size: int
    dp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    disaggregation_mode: str = "null"
    internal_states: list[LoadOfRank]
    version: str


class Loads(Struct, frozen=True, kw_only=True):
    """Answer of GET /v1/loads."""

    loads: list[LoadOfRank]


def load_of(load: Load) -> LoadOfRank:
    return LoadOfRank(load.num_running, load.num_waiting, load.num_requests)


def tokens_of(load: Load) -> TokensOfRank:
    return TokensOfRank(load.num_requests, load.num_waiting, load.num_tokens)


def model_info(config: GatewayConfig) -> ModelInfo:
    return ModelInfo(**_of_model(config))


def server_info(config: GatewayConfig, members: Iterable[Member], load: Load, version: str) -> ServerInfo:
    ranks = Counter(str(member.attributes.get("group", "")) for member in members if member.role == WORKER)
    return ServerInfo(
        **_of_model(config),
        host=config.host,
        port=config.port,
        context_length=config.context_length,
        tp_size=max(ranks.values(), default=1),
        internal_states=[load_of(load)],
        version=version,
    )


def _of_model(config: GatewayConfig) -> dict[str, Any]:
    path = config.model or config.model_name
    names = {"model_path": path, "tokenizer_path": path, "served_model_name": config.model_name}
    return {**names, "is_generation": config.makes_text}
