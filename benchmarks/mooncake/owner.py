"""A host of a real pool, as a process: `python -m benchmarks.mooncake.owner` gives memory to it, and puts.

It reads lines of a key and a number of bytes, puts that many, and prints the code; it ends with its input.
"""

import sys

from mooncake.mooncake_config import MooncakeConfig
from mooncake.store import MooncakeDistributedStore


def main() -> None:
    config = MooncakeConfig.load_from_env()
    client = MooncakeDistributedStore()
    code = client.setup(
        config.local_hostname,
        config.metadata_server,
        config.global_segment_size,
        config.local_buffer_size,
        config.protocol,
        config.device_name,
        config.master_server_address,
    )
    print(code, flush=True)
    for line in sys.stdin:
        key, size = line.split()
        print(client.put(key, bytes(int(size))), flush=True)


if __name__ == "__main__":
    main()
