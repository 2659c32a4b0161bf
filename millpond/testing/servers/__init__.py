"""Servers for tests, on the loopback interface: ZooKeeper ensembles, S3, proxies that fail."""
