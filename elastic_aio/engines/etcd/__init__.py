"""The store of a job on etcd v3, through its JSON gateway."""
