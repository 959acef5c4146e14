"""Making snapshots durable: the process that writes files, and the publishing of what all hosts wrote."""
