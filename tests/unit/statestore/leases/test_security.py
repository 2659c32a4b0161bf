"""The configuration of a secured ensemble."""

from __future__ import annotations

import copy
import pickle
import ssl
import traceback
from pathlib import Path

import pytest
from kazoo.security import ACL, Id

from millpond.statestore.errors import InvalidError
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.servers.secured_zookeeper import Authority

PLANTED = "planted-s3cret"


def all_text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error)


def test_repr_shows_no_secret() -> None:
    """Copying and pickling keep both passwords."""
    security = ZooKeeperSecurity(
        user="shop", password=PLANTED, certificate_file="shop.pem", key_password=PLANTED
    )

    assert PLANTED not in f"{security!r} {security} {[security]}"
    assert pickle.loads(pickle.dumps(security)) == security
    assert copy.copy(security).key_password == PLANTED


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"user": "shop"}, "give both"),
        ({"password": PLANTED}, "give both"),
        ({"key_file": "key.pem"}, "certificate_file"),
        ({"key_password": PLANTED}, "certificate_file"),
        ({"grants": ("sasl:auditor:r",)}, "to whom the nodes belong"),
        ({"user": "shop", "password": PLANTED, "grants": ("auditor:r",)}, "scheme:id:permissions"),
        ({"user": "shop", "password": PLANTED, "grants": ("sasl:auditor:rx",)}, "scheme:id:permissions"),
    ],
)
def test_incomplete_credentials_and_malformed_grants_are_refused(
    arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidError, match=message) as refused:
        ZooKeeperSecurity(**arguments)  # type: ignore[arg-type]
    assert PLANTED not in str(refused.value)


def test_access_list_names_user_or_subject_or_world() -> None:
    user = ZooKeeperSecurity(user="shop", password=PLANTED, grants=("sasl:auditor:r", "ip:10.0.0.1:rwcda"))
    subject = ZooKeeperSecurity(certificate_file="shop.pem")

    assert user.access_list == [
        ACL(31, Id("sasl", "shop")),
        ACL(1, Id("sasl", "auditor")),
        ACL(31, Id("ip", "10.0.0.1")),
    ]
    assert subject.access_list == [ACL(31, Id("auth", ""))]
    assert ZooKeeperSecurity(tls=True).access_list == []


def test_toml_file_is_read(tmp_path: Path) -> None:
    """Paths are relative to its folder."""
    file = tmp_path / "zookeeper.toml"
    file.write_text(
        f'user = "shop"\npassword = "{PLANTED}"\nca_file = "ca.pem"\n'
        'check_hostname = false\ngrants = ["sasl:auditor:r"]\n'
    )

    assert ZooKeeperSecurity.from_file(file) == ZooKeeperSecurity(
        user="shop",
        password=PLANTED,
        ca_file=tmp_path / "ca.pem",
        check_hostname=False,
        grants=("sasl:auditor:r",),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f'password = "{PLANTED}', "must be TOML"),
        (f'user = "shop"\npasswort = "{PLANTED}"', "passwort"),
        (f'tls = "{PLANTED}"', "tls is true or false"),
        (f'password = ["{PLANTED}"]', "password is a text"),
        (f'grants = "{PLANTED}"', "grants is a list"),
    ],
)
def test_malformed_file_is_refused_without_its_content(tmp_path: Path, text: str, message: str) -> None:
    """The traceback must not show a line of it either."""
    file = tmp_path / "zookeeper.toml"
    file.write_text(text)

    with pytest.raises(InvalidError, match=message) as refused:
        ZooKeeperSecurity.from_file(file)
    assert str(file) in str(refused.value)
    assert PLANTED not in all_text(refused.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="nowhere"):
        ZooKeeperSecurity.from_file(tmp_path / "nowhere.toml")


def test_environment_overrides_values_of_file(tmp_path: Path) -> None:
    file = tmp_path / "zookeeper.toml"
    file.write_text(f'user = "shop"\npassword = "{PLANTED}"')
    environment = {
        "MILLPOND_ZOOKEEPER_SECURITY": str(file),
        "MILLPOND_ZOOKEEPER_USER": "other",
        "MILLPOND_ZOOKEEPER_TLS": "True",
        "MILLPOND_ZOOKEEPER_GRANTS": "sasl:auditor:r, sasl:admin:rwcda",
    }

    assert ZooKeeperSecurity.from_environment(environment) == ZooKeeperSecurity(
        user="other", password=PLANTED, tls=True, grants=("sasl:auditor:r", "sasl:admin:rwcda")
    )
    assert ZooKeeperSecurity.from_environment({}) == ZooKeeperSecurity()
    with pytest.raises(InvalidError, match="MILLPOND_ZOOKEEPER_TLS"):
        ZooKeeperSecurity.from_environment({"MILLPOND_ZOOKEEPER_TLS": "perhaps"})


def test_security_without_hosts_is_refused(tmp_path: Path) -> None:
    """The store's own server is not started."""
    security = ZooKeeperSecurity(user="shop", password=PLANTED)

    with pytest.raises(InvalidError, match="is for an ensemble"):
        Store.open(tmp_path / "pond", zookeeper_security=security)
    assert not (tmp_path / "pond").exists()


def test_certificate_files_are_checked_early(tmp_path: Path) -> None:
    """Otherwise the TLS library would ask for the password of a key."""
    authority = Authority(tmp_path, SystemClock())
    client = authority.issue("client", key_password=PLANTED)
    right = ZooKeeperSecurity(ca_file=authority.ca_file, certificate_file=client, key_password=PLANTED)
    wrong = (
        ZooKeeperSecurity(ca_file=tmp_path / "nowhere.pem"),
        ZooKeeperSecurity(ca_file=authority.ca_file, certificate_file=tmp_path / "nowhere.pem"),
        ZooKeeperSecurity(ca_file=authority.ca_file, certificate_file=client),
        ZooKeeperSecurity(ca_file=authority.ca_file, certificate_file=client, key_password="x" + PLANTED),
    )

    context = right.tls_context()
    assert context is not None
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert len(context.get_ca_certs()) == 1
    for each in wrong:
        with pytest.raises(InvalidError, match=r"\.pem") as refused:
            each.tls_context()
        assert PLANTED not in all_text(refused.value)
