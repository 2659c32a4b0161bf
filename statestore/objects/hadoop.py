"""Hadoop's properties for storage options, and its errors where a JVM lacks them.

Python opens an object store with its storage options. Spark's JVM reads and writes inputs, checkpoints and tables with
Hadoop's connectors, which have names of their own for the same things.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from millpond.statestore.errors import InvalidError
from millpond.statestore.visible import options_without_secrets

S3_SCHEMES: Final = ("s3", "s3a")
S3A_FILE_SYSTEM: Final = "org.apache.hadoop.fs.s3a.S3AFileSystem"

_S3A: Final = (
    ("access_key_id", "fs.s3a.access.key"),
    ("secret_access_key", "fs.s3a.secret.key"),
    ("session_token", "fs.s3a.session.token"),
    ("token", "fs.s3a.session.token"),
    ("region", "fs.s3a.endpoint.region"),
    ("default_region", "fs.s3a.endpoint.region"),
    ("endpoint_url_s3", "fs.s3a.endpoint"),
    ("endpoint_url", "fs.s3a.endpoint"),
    ("endpoint", "fs.s3a.endpoint"),
    ("request_payer", "fs.s3a.requester.pays.enabled"),
    ("server_side_encryption", "fs.s3a.encryption.algorithm"),
    ("sse_kms_key_id", "fs.s3a.encryption.key"),
    ("sse_customer_key_base64", "fs.s3a.encryption.key"),
)
"""The property of each storage option, without its prefix ``aws_``. Of several options for a property the first wins."""

_S3A_OTHERWISE: Final = frozenset({"skip_signature", "virtual_hosted_style_request", "proxy_url"})
"""Options that become several properties, or other values."""

_S3_CLIENT_ONLY: Final = frozenset(
    [
        "allow_http",
        "bucket",
        "bucket_name",
        "checksum_algorithm",
        "conditional_put",
        "connect_timeout",
        "copy_if_not_exists",
        "disable_tagging",
        "http1_only",
        "http2_only",
        "imdsv1_fallback",
        "metadata_endpoint",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "read_timeout",
        "timeout",
        "unsigned_payload",
        "user_agent",
    ]
)
"""Options that say how the client in Python works, and not how to reach the store."""

_ENCRYPTIONS: Final = {
    "AES256": "SSE-S3", "aws:kms": "SSE-KMS", "aws:kms:dsse": "DSSE-KMS", "sse-c": "SSE-C"
}  # fmt: skip
_PATTERN_SIGN: Final = re.compile(r"[][*?{}\\]")
_TRUE: Final = frozenset({"1", "true", "on", "yes", "y"})
_S3A_CLASSES: Final = {
    "fs.s3.impl": S3A_FILE_SYSTEM,
    "fs.AbstractFileSystem.s3.impl": "org.apache.hadoop.fs.s3a.S3A",
}
_PROVIDER: Final = "fs.s3a.aws.credentials.provider"
_ANONYMOUS: Final = "org.apache.hadoop.fs.s3a.AnonymousAWSCredentialsProvider"
_WEB_IDENTITY: Final = "software.amazon.awssdk.auth.credentials.WebIdentityTokenFileCredentialsProvider"


def literal_pattern(place: str) -> str:
    """Return the pattern that only this path fits, for calls of Spark that take every path for a pattern."""
    return _PATTERN_SIGN.sub(r"\\\g<0>", place)


def scheme_of(place: object) -> str:
    """Return the scheme of a URL; "" for a path."""
    text = str(place)
    return urlsplit(text).scheme.lower() if "://" in text else ""


def hadoop_properties(
    url: str, storage_options: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the properties with which Hadoop's S3A reaches the store of an ``s3://`` URL like Python does.

    Missing options come from the environment, as for Python. Keys and endpoint count for all buckets of the session.

    Raises:
        InvalidError: an option has no counterpart in S3A.
    """
    given = {name.lower().removeprefix("aws_"): value for name, value in storage_options.items()}
    known = {name for name, _ in _S3A} | _S3A_OTHERWISE
    if unknown := given.keys() - known - _S3_CLIENT_ONLY:
        raise InvalidError(
            "these storage options have no counterpart in Hadoop's S3A: leave them out for Spark, and give S3A's own "
            "properties in the session's options, as spark.hadoop.fs.s3a.…",
            options=options_without_secrets({name: given[name] for name in sorted(unknown)}),
        )
    from_environment = {
        name.lower().removeprefix("aws_"): value
        for name, value in environment.items()
        if name.startswith("AWS_")
    }
    chosen = {name: value for name, value in from_environment.items() if name in known} | given
    properties = dict(_S3A_CLASSES)
    for name, prop in _S3A:
        if chosen.get(name):
            properties.setdefault(prop, chosen[name])
    return properties | _derived(urlsplit(url).netloc, chosen, properties, environment)


def _derived(
    bucket: str, chosen: Mapping[str, str], properties: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, str]:
    derived: dict[str, str] = {}
    if endpoint := properties.get("fs.s3a.endpoint"):
        is_virtual = _is_true(chosen.get("virtual_hosted_style_request", ""))
        derived = {
            # Python's client takes the bucket in the host's name, S3A puts it there.
            "fs.s3a.endpoint": endpoint.replace(f"://{bucket}.", "://") if is_virtual else endpoint,
            "fs.s3a.path.style.access": str(not is_virtual).lower(),
            "fs.s3a.connection.ssl.enabled": str(not endpoint.startswith("http://")).lower(),
            "fs.s3a.endpoint.region": properties.get("fs.s3a.endpoint.region", "us-east-1"),
        }
    if _is_true(chosen.get("skip_signature", "")):
        derived[_PROVIDER] = _ANONYMOUS
    elif "fs.s3a.access.key" not in properties and environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        derived[_PROVIDER] = _WEB_IDENTITY
    if algorithm := properties.get("fs.s3a.encryption.algorithm"):
        derived["fs.s3a.encryption.algorithm"] = _ENCRYPTIONS.get(algorithm, algorithm)
    if proxy := chosen.get("proxy_url"):
        parts = urlsplit(proxy)
        found = {
            "host": parts.hostname,
            "port": parts.port,
            "username": parts.username,
            "password": parts.password,
        }
        derived |= {f"fs.s3a.proxy.{name}": str(value) for name, value in found.items() if value}
    return derived


def _is_true(text: str) -> bool:
    return text.lower() in _TRUE


_S3_NEEDS: Final = (
    "make the session with mp.spark_session(store=…, storage_options=…), or add to your own org.apache.hadoop:hadoop-aws of "
    "its Hadoop (spark.jars.packages, --packages of spark-submit), "
    f"spark.hadoop.fs.s3.impl={S3A_FILE_SYSTEM}, and spark.hadoop.fs.s3a.access.key, .secret.key, "
    ".endpoint and .path.style.access as far as the store needs them"
)
_AZURE_NEEDS: Final = (
    "add org.apache.hadoop:hadoop-azure of the session's Hadoop (spark.jars.packages, --packages of spark-submit), and "
    "spark.hadoop.fs.azure.account.key.ACCOUNT.dfs.core.windows.net or another way to log in"
)
_NEEDS: Final = {
    "s3": _S3_NEEDS,
    "s3a": _S3_NEEDS,
    "abfs": _AZURE_NEEDS,
    "abfss": _AZURE_NEEDS,
    "gs": "add org.apache.hadoop:hadoop-gcp of the session's Hadoop, or Google's gcs-connector (spark.jars.packages, "
    "--packages of spark-submit), and spark.hadoop.fs.gs.auth.type with its keys",
}
_NEEDS_ANOTHER: Final = "Hadoop has no connector for this scheme: name a place that it can reach"

_OF_HADOOP: Final = re.compile(
    r"ClassNotFoundException: Class org\.apache\.hadoop\.fs\.|UnsupportedFileSystemException: "
    r"|NoAuthWithAWSException|AccessDeniedException: |UnknownStoreException: |UnknownHostException"
)
_JAVA_ERROR: Final = re.compile(
    r"^(?:: |Caused by: )?((?:[a-z]\w*\.)+\w+(?:Exception|Error): .*)", re.MULTILINE
)


def refused_by_hadoop(error: Exception, place: str) -> InvalidError | None:
    """Return the error for a place that a JVM cannot reach with its settings; ``None`` if the error is another one."""
    text = str(error)
    return unreachable(error, place) if _OF_HADOOP.search(text) else None


def unreachable(error: Exception, place: str) -> InvalidError:
    found = _JAVA_ERROR.search(str(error))
    return InvalidError(
        f"Spark cannot reach this place: {_NEEDS.get(scheme_of(place), _NEEDS_ANOTHER)}",
        path=place,
        cause=found[1] if found else str(error).partition("\n")[0],
    )
