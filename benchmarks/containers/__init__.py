"""Podman containers as the hosts of a mesh: an image of the current sources, networks, faults."""
