"""This engine, alone or behind its server, under a table of loads: `./everbatch bench load SCENARIO`."""
