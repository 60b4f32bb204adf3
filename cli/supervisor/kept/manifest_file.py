"""The manifest of a running mesh: written at every change, and again if the file is damaged or gone.

Without it `ps`, `probe` and `restart` do not find the mesh, and a container would be killed for a file. Only the
supervisor writes it, so whatever else stands there is replaced. Owned by `ProcessKeeper`.
"""

import asyncio
from collections.abc import Iterable
from typing import Final

import msgspec

from cli.supervisor.kept.mesh_directory import Manifest, MeshDirectory, ProcessRecord
from cli.supervisor.told.record import SupervisionRecord
from mesh.runtime.own_files import WatchedFile

_LOOK_S: Final = 1.0
"""Between two looks at the file. It is read only if it is not the file that was read last: reading it took a tenth of
an idle supervisor's time."""


class ManifestFile:
    """Writes the manifest of `directory`; does nothing before `begin`. Tells `record` what goes wrong, each once."""

    def __init__(self, directory: MeshDirectory, record: SupervisionRecord) -> None:
        self._directory = directory
        self._record = record
        self._manifest: Manifest | None = None
        self._trouble = ""
        self._file = WatchedFile(directory.manifest)

    def begin(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._write()

    def write(self, processes: Iterable[ProcessRecord]) -> None:
        if self._manifest is not None:
            self._manifest = msgspec.structs.replace(self._manifest, processes=list(processes))
            self._write()

    def look(self) -> None:
        if self._manifest is None or not self._file.has_changed() or self._directory.read_manifest() == self._manifest:
            return
        # After a write that failed the file is known to be old, and that has been told.
        was_lost = not self._trouble
        self._write()
        if was_lost and not self._trouble:
            self._record.trouble("the manifest was damaged or gone: it has been written again")

    async def keep(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def _write(self) -> None:
        assert self._manifest is not None, "there is a manifest to write once the mesh has begun"
        try:
            self._directory.write_manifest(self._manifest)
        except OSError as error:
            # The mesh goes on: actors end with their supervisor's pipe; the manifest is for those that cannot.
            trouble = f"the manifest cannot be written: {error}"
            if trouble != self._trouble:
                self._record.trouble(trouble)
            self._trouble = trouble
        else:
            self._trouble = ""
