"""Starting ranks on one host: template process, fork, environment of a worker, errors of ranks."""
