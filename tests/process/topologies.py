"""Topology files of meshes whose hosts are addresses of the loopback interface."""

from mesh.testing.ports import free_port

SERVING = {"gateways": 1, "tokenizers": 1, "detokenizers": 1}


def write_topology(file, port, hosts, pages=200, **settings):
    """Of these hosts with their roles, which listen at 127.0.0.1 and the addresses behind it; the registry's port."""
    registry_port = free_port()
    tables = {"": {"port": port, "registry_port": registry_port, **settings}, "[kv]": {"pages": pages}}
    for number, (name, roles) in enumerate(hosts.items(), 1):
        address = f"127.0.0.{number}"
        tables[f"[hosts.{name}]"] = {"address": address, "bind": address, **roles}
    lines = [[title, *(f"{name} = {value!r}".replace("True", "true") for name, value in table.items())]
             for title, table in tables.items()]  # fmt: skip
    file.write_text("\n".join(line for table in lines for line in table))
    return registry_port
