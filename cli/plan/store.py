"""Whether KV pages can be kept by the store that `--kv-store` names, as far as that is known before anything runs.

Its code runs only in agents, once a worker has told how it computes (`nodes/kv_agent/stores/installed.py`): what is
wrong with its options, or with what it connects to, is said then.
"""

from pathlib import Path

from cli.errors import BadConfig
from cli.plan.disk import require_storable
from cli.plan.settings import Settings
from kvstore.errors import StoreKeyUnusable
from kvstore.store.installed.key import read_key
from kvstore.store.installed.plugins import GROUP, installed_stores
from nodes.kv_agent.config import InstalledStoreConfig
from nodes.model_spec import ModelSpec


def plan_store(settings: Settings, spec: ModelSpec) -> InstalledStoreConfig | None:
    """What the agent is told; None if no store is named. Raises BadConfig."""
    store = settings.kv.store
    if not store.name:
        return None
    require_storable(settings, spec, "--kv-store")
    have = installed_stores()
    if store.name not in have:
        raise BadConfig(
            f"there is no store {store.name}",
            why=f"installed are: {', '.join(have) or 'none'} (entry points of {GROUP})",
            do="install the package that brings it in the environment of meshctl, or correct --kv-store",
        )
    key_file = str(Path(store.key_file).expanduser().absolute()) if store.key_file else ""
    try:
        if key_file:
            read_key(key_file)
    except StoreKeyUnusable as error:
        raise BadConfig(
            "KV pages cannot be signed", why=error.message, do="correct key_file of [kv.store], or leave it out"
        ) from None
    return InstalledStoreConfig(
        name=store.name,
        options=store.options,
        deadline_s=store.deadline_s,
        bytes_per_s=store.bytes_per_s,
        key_file=key_file,
    )
