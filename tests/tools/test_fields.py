"""No field without a reader: what product code only ever sets can go.

By name: a field counts as read if any attribute of that name is read anywhere, or a string of the source is its name.
"""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [path for package in ("mesh", "kvstore", "nodes", "cli") for path in (ROOT / package).rglob("*.py")]

HTTP = "in the body of an HTTP answer"
UNPACKED = "its tuple is unpacked"
READ_OTHERWISE = {
    "ModelCard.max_model_len": HTTP,
    "ModelCard.owned_by": HTTP,
    "Tokenized.max_model_len": HTTP,
    "Tokenized.token_strs": HTTP,
    "ChatCompletion.prompt_token_ids": HTTP,
    "CompletionChoice.prompt_token_ids": HTTP,
    "Classified.label": HTTP,
    "Classified.probs": HTTP,
    "Classified.num_classes": HTTP,
    "PromptLogprob.decoded_token": HTTP,
    "InputTokensDetails.cache_write_tokens": HTTP,
    "CompletionTokensDetails.reasoning_tokens": HTTP,
    "ResponseUsage.input_tokens": HTTP,
    "ResponseUsage.input_tokens_details": HTTP,
    "ResponseUsage.output_tokens_details": HTTP,
    "ResponseDeleted.deleted": HTTP,
    "Response.created_at": HTTP,
    "Response.completed_at": HTTP,
    "Response.incomplete_details": HTTP,
    "MessageUsage.input_tokens": HTTP,
    "MessageUsage.cache_creation_input_tokens": HTTP,
    "MessageUsage.cache_read_input_tokens": HTTP,
    "TokensCount.input_tokens": HTTP,
    "ThinkingAnswer.signature": HTTP,
    "ThinkingBlock.signature": "not checked, since conversations may have begun elsewhere",
    "ThinkingEnabled.budget_tokens": "a target that no model is held to, but a body has to name one",
    "ServerLoad.server_load": HTTP,
    "LoadOfRank.dp_rank": HTTP,
    "LoadOfRank.num_running_reqs": HTTP,
    "LoadOfRank.num_total_reqs": HTTP,
    "LoadOfRank.num_waiting_reqs": HTTP,
    "ModelInfo.has_audio_understanding": HTTP,
    "ModelInfo.has_image_understanding": HTTP,
    "ModelInfo.preferred_sampling_params": HTTP,
    "ServerInfo.disaggregation_mode": HTTP,
    "ServerInfo.dp_size": HTTP,
    "TokensOfRank.dp_rank": HTTP,
    "TokensOfRank.num_reqs": HTTP,
    "TokensOfRank.num_waiting_reqs": HTTP,
    "ServerInfo.ep_size": HTTP,
    "ServerInfo.internal_states": HTTP,
    "ServerInfo.pp_size": HTTP,
    "MetaInfo.cached_tokens_details": HTTP,
    "CachedTokensDetails.storage": HTTP,
    "CachedTokensDetails.storage_backend": HTTP,
    "SglExt.cached_tokens_details": HTTP,
    "ChatCompletion.sglext": HTTP,
    "Completion.sglext": HTTP,
    "Link.nonce": "two connections of one incarnation are different keys",
    "Choice.build": UNPACKED,
    "_Engine.mover": UNPACKED,
    "StoreContext.num_ranks": "for stores of other packages",
}


def last_name(node: ast.expr) -> str:
    """`Struct` of `msgspec.Struct`, `Transport` of `Transport[Copy]`."""
    return ast.unparse(node).split("[")[0].split(".")[-1]


def is_data(node: ast.ClassDef, classes: dict[str, list[ast.ClassDef]]) -> bool:
    """Whether a class is a struct, a named tuple or a dataclass."""
    bases = {last_name(base) for base in node.bases} - {node.name}
    return (
        bool(bases & {"Struct", "NamedTuple"})
        or any("dataclass" in ast.unparse(one) for one in node.decorator_list)
        or any(is_data(one, classes) for base in bases for one in classes.get(base, []))
    )


def fields_of(node: ast.ClassDef) -> list[str]:
    """Names of a class's own fields, in order."""
    return [one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]


def test_every_field_is_read() -> None:
    every = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))]
    classes: defaultdict[str, list[ast.ClassDef]] = defaultdict(list)
    for node in every:
        if isinstance(node, ast.ClassDef):
            classes[node.name].append(node)
    read = {node.attr for node in every if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    read |= {node.value for node in every if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    for node in every:
        if isinstance(node, ast.MatchClass):
            read.update(node.kwd_attrs)
            # `case Spawn(actor_id, _)` reads the first field only.
            for names in map(fields_of, classes.get(last_name(node.cls), [])):
                read.update(name for name, one in zip(names, node.patterns, strict=False) if ast.unparse(one) != "_")
    data = [node for named in classes.values() for node in named if is_data(node, classes)]
    unread = {f"{node.name}.{name}" for node in data for name in fields_of(node) if name not in read}
    assert len(data) > 300, "the scan no longer finds them"
    assert unread == set(READ_OTHERWISE), "remove the field, or say here who reads it"
