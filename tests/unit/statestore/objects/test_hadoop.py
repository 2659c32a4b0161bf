"""Storage options as properties of Hadoop's S3A, and the errors of a JVM without them."""

from __future__ import annotations

from typing import Final

import pytest

from millpond.statestore.errors import InvalidError
from millpond.statestore.objects.hadoop import hadoop_properties, refused_by_hadoop

URL: Final = "s3://bucket/pond"
CLASSES: Final = {
    "fs.s3.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem",
    "fs.AbstractFileSystem.s3.impl": "org.apache.hadoop.fs.s3a.S3A",
}
OTHER_SERVER: Final = {
    "fs.s3a.endpoint": "http://host:9000",
    "fs.s3a.endpoint.region": "us-east-1",
    "fs.s3a.path.style.access": "true",
    "fs.s3a.connection.ssl.enabled": "false",
}


@pytest.mark.parametrize(
    ("options", "properties"),
    [
        ({}, {}),
        ({"aws_region": "eu-central-1"}, {"fs.s3a.endpoint.region": "eu-central-1"}),
        (
            {"AWS_ACCESS_KEY_ID": "k", "secret_access_key": "s", "aws_session_token": "t"},
            {"fs.s3a.access.key": "k", "fs.s3a.secret.key": "s", "fs.s3a.session.token": "t"},
        ),
        ({"aws_endpoint_url": "http://host:9000", "allow_http": "true", "timeout": "10s"}, OTHER_SERVER),
        ({"endpoint": "http://host:9000", "aws_endpoint_url_s3": "http://s3:1"}, {
            **OTHER_SERVER, "fs.s3a.endpoint": "http://s3:1",
        }),
        (
            {"aws_endpoint": "https://bucket.host", "aws_virtual_hosted_style_request": "true", "region": "x"},
            {
                "fs.s3a.endpoint": "https://host",
                "fs.s3a.endpoint.region": "x",
                "fs.s3a.path.style.access": "false",
                "fs.s3a.connection.ssl.enabled": "true",
            },
        ),
        (
            {"aws_skip_signature": "TRUE"},
            {"fs.s3a.aws.credentials.provider": "org.apache.hadoop.fs.s3a.AnonymousAWSCredentialsProvider"},
        ),
        ({"aws_request_payer": "true"}, {"fs.s3a.requester.pays.enabled": "true"}),
        (
            {"aws_server_side_encryption": "aws:kms", "aws_sse_kms_key_id": "arn"},
            {"fs.s3a.encryption.algorithm": "SSE-KMS", "fs.s3a.encryption.key": "arn"},
        ),
        (
            {"proxy_url": "http://user:pass@proxy:3128"},
            {
                "fs.s3a.proxy.host": "proxy",
                "fs.s3a.proxy.port": "3128",
                "fs.s3a.proxy.username": "user",
                "fs.s3a.proxy.password": "pass",
            },
        ),
    ],
)  # fmt: skip
def test_options_become_properties_of_s3a(options: dict[str, str], properties: dict[str, str]) -> None:
    assert hadoop_properties(URL, options, {}) == CLASSES | properties


def test_missing_options_come_from_the_environment() -> None:
    environment = {
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_ENDPOINT_URL": "http://host:9000",
        "AWS_PROFILE": "unknown to Python's client",
        "HOME": "/root",
    }
    given = hadoop_properties(URL, {"aws_access_key_id": "mine"}, environment)

    assert given == CLASSES | OTHER_SERVER | {"fs.s3a.access.key": "mine"}


@pytest.mark.parametrize(("options", "is_asked"), [({}, True), ({"aws_access_key_id": "k"}, False)])
def test_token_file_of_the_environment_is_used_without_a_key(options: dict[str, str], is_asked: bool) -> None:
    given = hadoop_properties(URL, options, {"AWS_WEB_IDENTITY_TOKEN_FILE": "/token"})

    provider = given.get("fs.s3a.aws.credentials.provider", "")
    assert provider.endswith("WebIdentityTokenFileCredentialsProvider") == is_asked


@pytest.mark.parametrize(
    ("option", "shown"), [("allow_invalid_certificates", "true"), ("aws_container_token", "***")]
)
def test_option_without_a_counterpart_is_refused(option: str, shown: str) -> None:
    """Without it the JVM would reach another store than Python, or none."""
    with pytest.raises(InvalidError, match=r"spark\.hadoop\.fs\.s3a\.") as refused:
        hadoop_properties(URL, {option: "true"}, {})

    assert f"'{option.removeprefix('aws_')}': '{shown}'" in str(refused.value)


_CALL: Final = "An error occurred while calling o1.load.\n: "


@pytest.mark.parametrize(
    ("url", "error", "words"),
    [
        (
            URL,
            (
                "java.lang.RuntimeException: java.lang.ClassNotFoundException: Class "
                "org.apache.hadoop.fs.s3a.S3AFileSystem not found\n\tat a.b.C"
            ),
            ("mp.spark_session(store=…", "hadoop-aws", "cause=`java.lang.RuntimeException"),
        ),
        (
            URL,
            'org.apache.hadoop.fs.UnsupportedFileSystemException: No FileSystem for scheme "s3"\n\tat a.b.C',
            ("fs.s3.impl=", 'No FileSystem for scheme "s3"'),
        ),
        (
            "abfss://c@a.dfs.core.windows.net/pond",
            (
                "java.lang.RuntimeException: java.lang.ClassNotFoundException: Class "
                "org.apache.hadoop.fs.azurebfs.SecureAzureBlobFileSystem not found"
            ),
            ("hadoop-azure", "fs.azure.account.key"),
        ),
        (
            "az://container/pond",
            'org.apache.hadoop.fs.UnsupportedFileSystemException: No FileSystem for scheme "az"',
            ("name a place that it can reach",),
        ),
    ],
)
def test_error_of_a_jvm_without_a_connector_becomes_one_sentence(
    url: str, error: str, words: tuple[str, ...]
) -> None:
    refused = refused_by_hadoop(RuntimeError(_CALL + error), url)

    assert refused is not None
    text = str(refused)
    assert "\tat" not in text
    assert all(word in text for word in (*words, url)), text


def test_other_errors_of_a_jvm_stay_as_they_are() -> None:
    assert refused_by_hadoop(RuntimeError(f"{_CALL}java.lang.IllegalStateException: no"), URL) is None
