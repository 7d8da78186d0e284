"""KV on disks and in memory that outlives an engine: the files, and what is checked before they are believed."""
