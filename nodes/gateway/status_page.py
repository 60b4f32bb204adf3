"""The page at `/`: what is served, which actors there are, a command to try. No script, nothing from elsewhere."""

from collections.abc import Mapping, Sequence
from html import escape

from mesh.membership.view import Member
from nodes.actor_figures import FIGURE_NAMES, ActorFigures, figure_texts
from nodes.gateway.config import GatewayConfig
from nodes.numerics import numerics_note, quantization_note
from nodes.stats import hosts_of

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.2rem .8rem .2rem 0;"
    "border-bottom:1px solid #ddd}pre{background:#f4f4f4;padding:.8rem;overflow:auto}.bad{color:#b00}"
)


_HEADS = "".join(f"<th>{name.lower()}" for name in FIGURE_NAMES)


def status_page(
    config: GatewayConfig,
    members: Sequence[Member],
    figures: Mapping[str, ActorFigures],
    missing: Sequence[str],
    base_url: str,
    silent: Sequence[str] = (),
) -> bytes:
    """HTML; texts from elsewhere are escaped. `figures`: by actor id; `silent`: hosts from which no actor answers."""
    state = "ready" if not missing else "not ready: " + "; ".join(missing)
    hosts = hosts_of(members)
    rows = "".join(
        f"<tr><td>{escape(member.actor_id)}{f'<td>{escape(hosts[member.actor_id])}' if hosts else ''}"
        f"<td>{escape(member.role)}<td>{escape(member.state)}"
        f"<td>{member.pid}<td>{member.epoch}{_cells(figures.get(member.actor_id, ActorFigures()))}"
        for member in members
    )
    example = (
        f"curl {base_url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f'  -d \'{{"model": "{config.model_name}", "messages": [{{"role": "user", "content": "Hello"}}]}}\''
    )
    name = escape(config.model_name)
    note = "; ".join(filter(None, (quantization_note(members), numerics_note(members))))
    context = f"context {config.context_length} tokens" if config.context is None else escape(str(config.context))
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>kvmesh: {name}</title><style>{_STYLE}</style>"
        f"<h1>kvmesh</h1><p>Model <b>{name}</b>. {context}."
        f"<p class={'bad' if missing else 'good'}>{escape(state)}"
        f"{f'<p>{escape(note)}' if note else ''}"
        f"{''.join(f'<p class=bad>host {escape(host)} does not answer' for host in silent)}"
        f"<table><tr><th>actor{'<th>host' if hosts else ''}<th>role<th>state<th>pid<th>epoch{_HEADS}{rows}</table>"
        f"<pre>{escape(example)}</pre>"
        "<p><a href=/docs>docs</a> · <a href=/v1/models>models</a> · <a href=/metrics>metrics</a>"
    )
    return page.encode()


def _cells(figures: ActorFigures) -> str:
    return "".join(f"<td>{escape(text)}" for text in figure_texts(figures))
