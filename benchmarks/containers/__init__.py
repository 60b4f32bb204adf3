"""Containers as the hosts of a mesh, by podman: an image of the sources as they are, networks, faults."""
