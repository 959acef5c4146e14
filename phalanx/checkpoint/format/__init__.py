"""What a checkpoint on durable storage consists of: manifest, tables, archives, and how they are read and checked."""
