from mesh.membership.spec import spec_faults

MESH = {"model": "tiny", "layout": "cfbf", "page_size": "16"}
OTHER = {"model": "tiny", "layout": "37f9", "page_size": "32"}


def test_what_differs_is_said_and_the_layout_where_nothing_else_does() -> None:
    assert spec_faults(MESH, MESH) == []
    assert spec_faults(MESH | {"layout": "37f9"}, MESH) == ["layout is 37f9 here and cfbf in the mesh"]
    assert spec_faults(OTHER, MESH) == ["page size is 32 here and 16 in the mesh"]
    assert spec_faults({"model": "echo", "unknown": "x"}, MESH) == ["model is echo here and tiny in the mesh"]
