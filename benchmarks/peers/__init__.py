"""`./everbatch bench peers`: environments, runners of the engines, the measured roof, table and plot."""
