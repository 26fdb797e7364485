"""Stores on engines outside a job: etcd v3, Redis."""
