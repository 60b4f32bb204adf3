"""Mooncake Store for measurements and tests: a master on free ports, a host that gives memory, and our figures."""
