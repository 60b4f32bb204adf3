import pytest

from cli.errors import BadConfig
from cli.plan import sources
from cli.plan.settings import Settings, parse_bytes
from cli.plan.sources import foreign_variables, load_settings
from tests.cli.refused import refused


def write(tmp_path, text):
    path = tmp_path / "mesh.toml"
    path.write_text(text)
    return path


def test_the_last_source_wins(tmp_path):
    file = write(tmp_path, 'port = 1111\nmodel = "echo"\nmax_running = 5\n[kv]\npages = 10\n')
    environment = {"KVMESH_PORT": "2222", "KVMESH_MAX_RUNNING": "6", "HOME": "/", "KVMESH_TOPOLOGY": "x"}
    settings = load_settings(file, environment, {"port": 3333, "kv__pages": None, "name": None})
    assert (settings.port, settings.model, settings.max_running, settings.kv.pages) == (3333, "echo", 6, 10)


def test_nested_environment_variables():
    settings = load_settings(None, {"KVMESH_KV__MEMORY": "1GiB", "KVMESH_SUPERVISION__RESTART_BUDGET": "3"}, {})
    assert settings.kv.memory == "1GiB"
    assert settings.supervision.restart_budget == 3


def test_roles_tables_are_kept(tmp_path):
    file = write(tmp_path, "[roles.gateway]\nmax_inflight = 7\n")
    assert load_settings(file, {}, {}).roles == {"gateway": {"max_inflight": 7}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port = 'x'", "port"),
        ("port = 0", "port"),
        ("prot = 1", "prot"),
        ("name = 'UPPER'", "name"),
        ("[kv]\npages = 1", "pages"),
        ("port = ", "not TOML"),
        ("dtype = 'int4'", "dtype"),
        ("quantize = 'int4'", "quantize"),
    ],
)
def test_a_bad_file_says_which_value(tmp_path, text, words):
    with refused(BadConfig, words):
        load_settings(write(tmp_path, text), {}, {})


def test_a_missing_file(tmp_path):
    with pytest.raises(BadConfig, match="cannot be read"):
        load_settings(tmp_path / "none.toml", {}, {})


def test_bad_environment_and_options_name_their_source():
    with pytest.raises(BadConfig, match="KVMESH_PORT"):
        load_settings(None, {"KVMESH_PORT": "many"}, {})
    with pytest.raises(BadConfig, match="--max-running cannot be used"):
        load_settings(None, {}, {"max_running": 0})
    with pytest.raises(BadConfig, match="--kv-pages cannot be used"):
        load_settings(None, {}, {"kv__pages": 1})
    with pytest.raises(BadConfig, match="enableServiceLinks"):
        load_settings(None, {"KVMESH_PORT": "tcp://10.0.0.7:8000"}, {})


def test_what_is_wrong_is_named_with_its_source_whatever_other_sources_say(tmp_path):
    file = write(tmp_path, "port = 1111\n[kv]\nmemory = '1GiB'\n")
    with refused(BadConfig, "environment variable KVMESH_PORT cannot be used", why="port is '70000'"):
        load_settings(file, {"KVMESH_PORT": "70000"}, {"port": 3333})
    with refused(BadConfig, "--kv-memory cannot be used", why="kv.memory is '2 parsecs'", do="512MiB"):
        load_settings(file, {"KVMESH_KV__MEMORY": "1GiB"}, {"kv__memory": "2 parsecs"})
    with refused(BadConfig, "mesh.toml cannot be used", why="kv.disk.size is '1 furlong'", do="512MiB"):
        load_settings(write(tmp_path, "[kv.disk]\nsize = '1 furlong'\n"), {}, {})
    with refused(BadConfig, "--kv-disk cannot be used", why="kv.disk.directory is 7"):
        load_settings(None, {}, {"kv__disk__directory": 7})
    with refused(BadConfig, "what the registry sent cannot be used", why="there is no setting max_cats"):
        load_settings(None, {}, {}, {"model": "echo", "max_cats": 3})


def test_a_foreign_variable_is_a_warning_and_changes_nothing():
    environment = {
        "KVMESH_PROT": "1",
        "KVMESH_SERVICE_HOST": "10.0.0.7",
        "KVMESH_KV": "x",
        "KVMESH_ROLES__GATWAY__PORT": "1",
        "KVMESH_LOG_LEVL": "info",
        "KVMESH_PORT": "4000",
        "KVMESH_ROLES__GATEWAY__MAX_INFLIGHT": "7",
        "KVMESH_LOG_LEVEL": "info",
        "HOME": "/",
    }
    settings = load_settings(None, environment, {})
    assert (settings.port, settings.roles) == (4000, {"gateway": {"max_inflight": 7}})
    warned = foreign_variables(environment)
    assert [line.split()[3] for line in warned] == [
        "KVMESH_KV", "KVMESH_LOG_LEVL", "KVMESH_PROT", "KVMESH_ROLES__GATWAY__PORT", "KVMESH_SERVICE_HOST"
    ]  # fmt: skip
    assert "did you mean KVMESH_PORT?" in warned[2]
    assert "did you mean KVMESH_LOG_LEVEL?" in warned[1]


@pytest.mark.parametrize(
    ("document", "why", "do"),
    [
        ({"prot": 1}, "there is no setting prot", "did you mean port?"),
        ({"kv": {"pagez": 1}}, "there is no setting kv.pagez", "did you mean kv.pages?"),
        ({"roles": {"gatway": {}}}, "there is no role gatway", "did you mean gateway?"),
        (
            {"roles": {"gateway": {"max_inflght": 1}}},
            "there is no setting roles.gateway.max_inflght",
            "did you mean roles.gateway.max_inflight?",
        ),
        (
            {"roles": {"gateway": {"port": "x"}}},
            "roles.gateway.port is 'x', but must be a whole number",
            "correct it",
        ),
        ({"port": 0}, "port is 0, but must be a whole number from 1 to 65,535", "correct it"),
        ({"kv": {"pages": "x"}}, "kv.pages is 'x', but must be a whole number of at least 2", "correct it"),
        ({"kv": {"page_size": 7}}, "kv.page_size is 7, but must be one of 8, 16, 32, 64", "correct it"),
        ({"mem_fraction": 2}, "mem_fraction is 2, but must be a number above 0 and of at most 0.98", "correct it"),
        ({"kv": 3}, "kv is 3, but must be a table", "correct it"),
        ({"supervision": {"fork": "x"}}, "supervision.fork is 'x', but must be true or false", "correct it"),
        ({"model": ""}, "model is '', but must be text that is not empty", "correct it"),
        ({"device": "gpu"}, "device is 'gpu', but must be cpu, cuda (all", "correct it"),
        ({"name": "UPPER"}, "name is 'UPPER', but must be lower-case letters, digits and dashes", "correct it"),
    ],
)
def test_faults_are_told_in_words_without_patterns_and_types(monkeypatch, tmp_path, document, why, do):
    monkeypatch.setattr(sources, "_read_file", lambda file: document)
    with pytest.raises(BadConfig) as caught:
        load_settings(tmp_path, {}, {})
    assert caught.value.why.startswith(why)
    assert caught.value.do.startswith(do)
    assert not set("^$\\`") & set(caught.value.why), "no pattern, no type of ours"


@pytest.mark.parametrize(
    ("given", "groups"),
    [
        ({}, (1, 1, 0)),
        ({"mixed": 2}, (0, 0, 2)),
        ({"prefill": 2}, (2, 1, 0)),
        ({"decode": 3}, (1, 3, 0)),
        ({"prefill": 1, "mixed": 1}, (1, 0, 1)),
        ({"prefill": 0, "decode": 1}, (0, 1, 0)),
        ({"mixed": 0}, (1, 1, 0)),
    ],
)
def test_groups(given, groups):
    assert Settings(**given).groups == groups


@pytest.mark.parametrize(
    ("text", "value"),
    [("1048576", 1 << 20), ("1MiB", 1 << 20), ("1 m", 1 << 20), ("2G", 2 << 30), ("1.5kb", 1536), ("1TiB", 1 << 40)],
)
def test_amounts_of_memory(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "much", "-1", "1 PiB", "1e9"])
def test_what_is_no_amount(text):
    for source, given in (
        ("--kv-memory", ({}, {"kv__memory": text})),
        ("KVMESH_KV__MEMORY", ({"KVMESH_KV__MEMORY": text}, {})),
    ):
        with refused(
            BadConfig, f"{source} cannot be used", why=f"kv.memory is {text!r}, but must be an amount of memory"
        ):
            load_settings(None, *given)


def test_origins_are_a_list_or_a_text_with_commas(tmp_path):
    file = write(tmp_path, 'cors_origins = ["https://chat.example"]')
    assert load_settings(file, {}, {}).allowed_origins == ("https://chat.example",)
    environment = {"KVMESH_CORS_ORIGINS": "http://localhost:3000, null-app://x"}
    assert load_settings(file, environment, {}).allowed_origins == ("http://localhost:3000", "null-app://x")
    assert load_settings(file, environment, {"cors_origins": ["*"]}).allowed_origins == ("*",)
    assert load_settings(None, {}, {}).allowed_origins == ()


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://chat.example/page", "://x"])
def test_an_origin_that_no_browser_sends_is_refused(origin):
    with refused(BadConfig, "as a whole", do="http://localhost:3000"):
        _ = load_settings(None, {}, {"cors_origins": [origin]}).allowed_origins


def test_proxies_are_a_list_or_a_text_with_commas():
    assert load_settings(None, {"KVMESH_TRUSTED_PROXIES": "10.0.0.0/8, ::1"}, {}).proxies == ("10.0.0.0/8", "::1")
    assert load_settings(None, {}, {"trusted_proxies": ["10.0.0.7"]}).proxies == ("10.0.0.7",)
    with refused(BadConfig, "10.0.0.0/33", do="10.0.0.0/8"):
        _ = load_settings(None, {}, {"trusted_proxies": ["10.0.0.0/33"]}).proxies


def test_a_collector_is_a_url():
    assert load_settings(None, {}, {}).collector == ""
    with refused(BadConfig, "no URL of a collector", do="--otel-endpoint"):
        _ = load_settings(None, {}, {"otel_endpoint": "collector:4318"}).collector


def test_several_names_are_a_list_or_a_text_with_commas():
    assert Settings().served_names == ()
    assert load_settings(None, {"KVMESH_SERVED_NAME": "a, b"}, {}).served_names == ("a", "b")
    assert load_settings(None, {}, {"served_name": ["a", "b", "a"]}).served_names == ("a", "b")
    assert load_settings(None, {}, {"served_name": ["a,b", "c"]}).served_names == ("a", "b", "c")
    for wrong in ("a,,b", [""], "a\tb", ["x" * 201]):
        with pytest.raises(BadConfig, match="cannot be used as names"):
            assert Settings(served_name=wrong).served_names


# hosts

HOSTS = """
insecure = true
host = "0.0.0.0"
[hosts.head]
address = "head.example"
gateways = 1
tokenizers = 1
detokenizers = 1
[hosts.p]
address = "10.0.0.2"
prefill = 2
[hosts.d-1]
address = "fd00::3"
bind = "::"
decode = 1
device = "cuda:0"
"""


def test_who_starts_a_host_says_which_it_is(tmp_path):
    file = write(tmp_path, HOSTS)
    settings = load_settings(file, {}, {"host": "p"})
    assert (settings.on, settings.host, settings.groups, settings.device) == ("p", "0.0.0.0", (2, 0, 0), "cpu")
    assert settings.own_host is not None
    assert (settings.own_host.address, settings.own_host.bind) == ("10.0.0.2", "0.0.0.0")
    assert (settings.registry_host, settings.registry_port, settings.mesh_groups) == ("head", 7400, (2, 1, 0))
    decode = load_settings(file, {"KVMESH_HOST": "d-1"}, {})
    assert (decode.on, decode.host, decode.groups, decode.device) == ("d-1", "0.0.0.0", (0, 1, 0), "cuda:0")
    # Devices are each host's own, also where one host's becomes the mesh's for whoever reads them.
    assert [host.device for host in decode.hosts.values()] == ["cpu", "cpu", "cuda:0"]
    assert load_settings(file, {"KVMESH_HOST": "d-1"}, {"host": "head", "device": "cuda"}).device == "cuda"
    chosen = load_settings(write(tmp_path, HOSTS + "registry = true"), {}, {"host": "head"})
    assert chosen.registry_host == "d-1"


@pytest.mark.parametrize("name", ["mesh_p_1", "p.svc.cluster.local.", "P-1.example"])
def test_a_host_may_have_any_name_that_can_be_looked_up(tmp_path, name):
    file = write(tmp_path, HOSTS.replace("10.0.0.2", name))
    assert load_settings(file, {}, {"host": "p"}).own_host.address == name


def test_without_hosts_the_word_is_the_address_of_the_gateway():
    settings = load_settings(None, {"KVMESH_HOST": "10.0.0.9", "KVMESH_ON": "p", "KVMESH_HOSTS": "p"}, {})
    assert (settings.host, settings.on, settings.own_host, settings.registry_host) == ("10.0.0.9", "", None, "")
    assert settings.mesh_groups == settings.groups == (1, 1, 0)
    assert load_settings(None, {}, {"host": "::1"}).host == "::1"


@pytest.mark.parametrize(
    ("old", "new", "words", "do"),
    [
        ("[hosts.p]", "[hosts.head]", "not TOML", "correct"),
        ("[hosts.p]", "[hosts.P]", "the name of a host is 'P', but must be lower-case letters", "correct"),
        ("[hosts.p]", "[hosts.1]", "the name of a host is '1'", "correct"),
        ("[hosts.p]", "[hosts.a-dozen-and-1]", "at most 12", "correct"),
        ('address = "10.0.0.2"', "", "hosts.p.address is not given", "what the other hosts dial"),
        ("10.0.0.2", "10.0.0.2:7400", "other hosts cannot dial|must be an IP address", ""),
        ("10.0.0.2", "tcp://10.0.0.2", "must be an IP address or a DNS name, without a port", "correct"),
        (
            "10.0.0.2",
            "0.0.0.0",
            r"\[hosts.p\] address is 0.0.0.0, which other hosts cannot dial",
            "an IP address of that host",
        ),
        ('bind = "::"', 'ports = "7500"', "hosts.d-1.ports is '7500'.* \"7500-7599\"", "correct"),
        (
            'bind = "::"',
            'ports = "7500-7500"',
            r"\[hosts.d-1\] ports is 7500-7500, which is not a port range",
            "takes two",
        ),
        ('bind = "::"', 'bind = "eth0"', r"\[hosts.d-1\] bind is 'eth0'", "0.0.0.0 for all"),
        ("prefill = 2", "prefil = 2", "there is no setting hosts.p.prefil", "did you mean hosts.p.prefill?"),
        ("prefill = 2", "prefill = -1", "hosts.p.prefill is -1, but must be a whole number", "correct"),
        ("[hosts.p]", "[hosts]\np = 3\n[hosts.q]", "not TOML|hosts.p is 3, but must be a table", ""),
        ("gateways = 1", "gateways = 0", "no host has a gateway", "gateways = 1"),
        ("tokenizers = 1\nde", "de", "no host has a tokenizer", "tokenizers = 1"),
        ("detokenizers = 1", "", "no host has a detokenizer", "detokenizers = 1"),
        (
            "prefill = 2",
            "registry = true\n[hosts.q]\naddress = 'q'\nregistry = true",
            "p and q cannot both",
            "one host",
        ),
        (
            "insecure = true",
            "insecure = true\nprefill = 1",
            r"prefill cannot be set together with \[hosts\]",
            "remove it",
        ),
        ("insecure = true", "insecure = true\ngateways = 2", "gateways cannot be set together with", "remove it"),
        ("insecure = true", "insecure = true\nregistry_port = 65535", "registry_port is 65535", "correct"),
        ("insecure = true", "insecure = true\non = 'p'", "`on` cannot be set", "--host"),
    ],
)
def test_hosts_that_make_no_mesh(tmp_path, old, new, words, do):
    assert old in HOSTS
    with pytest.raises(BadConfig, match=words) as caught:
        load_settings(write(tmp_path, HOSTS.replace(old, new, 1)), {}, {"host": "head"})
    assert do in caught.value.do
    assert not set("^$\\") & set(caught.value.why)


def test_a_mesh_of_hosts_without_any_group(tmp_path):
    text = HOSTS.replace("prefill = 2", "").replace("decode = 1", "")
    with pytest.raises(BadConfig, match="no host has a worker group"):
        load_settings(write(tmp_path, text), {}, {"host": "p"})


@pytest.mark.parametrize(
    ("given", "what", "do"),
    [
        ({}, "which host of the topology file", "--host head"),
        ({"host": "d1"}, "--host d1 is not a host", "did you mean d-1?"),
        ({"host": "10.0.0.2"}, "is not a host", "choose one of: head, p, d-1"),
        ({"host": "p", "decode": 1}, "decode cannot be set together with", "[hosts.p] decode = 1"),
    ],
)
def test_a_host_that_is_not_in_the_file(tmp_path, given, what, do):
    with pytest.raises(BadConfig, match=what) as caught:
        load_settings(write(tmp_path, HOSTS), {}, given)
    assert do in caught.value.do
    if "decode" not in given:
        assert "head, p, d-1" in caught.value.why


def test_hosts_on_the_loopback_need_no_word_for_it(tmp_path):
    text = "".join(f"[hosts.{name}]\naddress = '127.0.0.1'\nbind = '127.0.0.1'\nmixed = 1\n" for name in ("a", "b"))
    alone = "[hosts.c]\naddress = 'localhost'\nbind = '::1'\ngateways = 1\ntokenizers = 1\ndetokenizers = 1\n"
    assert load_settings(write(tmp_path, text + alone), {}, {"host": "c"}).groups == (0, 0, 0)
