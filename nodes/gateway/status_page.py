"""The page at `/`: what is served, who is there, and a line to try it with. No script, nothing from elsewhere."""

from collections.abc import Sequence
from html import escape

from mesh.membership import Member
from nodes.gateway.config import GatewayConfig

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.2rem .8rem .2rem 0;"
    "border-bottom:1px solid #ddd}pre{background:#f4f4f4;padding:.8rem;overflow:auto}.bad{color:#b00}"
)


def status_page(config: GatewayConfig, members: Sequence[Member], missing: Sequence[str], base_url: str) -> bytes:
    """HTML. Everything that comes from elsewhere is escaped."""
    state = "ready" if not missing else "not ready: " + "; ".join(missing)
    rows = "".join(
        f"<tr><td>{escape(member.actor_id)}<td>{escape(member.role)}<td>{escape(member.state)}"
        f"<td>{member.pid}<td>{member.epoch}<td>{escape(str(member.attributes.get('phase', '')))}"
        for member in members
    )
    example = (
        f"curl {base_url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f'  -d \'{{"model": "{config.model_name}", "messages": [{{"role": "user", "content": "Hello"}}]}}\''
    )
    name = escape(config.model_name)
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>kvmesh: {name}</title><style>{_STYLE}</style>"
        f"<h1>kvmesh</h1><p>Model <b>{name}</b>, context {config.context_length} tokens."
        f"<p class={'bad' if missing else 'good'}>{escape(state)}"
        f"<table><tr><th>actor<th>role<th>state<th>pid<th>epoch<th>phase{rows}</table>"
        f"<pre>{escape(example)}</pre>"
        "<p><a href=/metrics>metrics</a> · <a href=/openapi.json>openapi.json</a> · <a href=/v1/models>models</a>"
    )
    return page.encode()
