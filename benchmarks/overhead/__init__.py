"""What a token costs on its way from the engine to a client, part by part: `./everbatch bench overhead`."""
