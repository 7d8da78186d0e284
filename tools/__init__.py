"""Programs of this checkout that write what the product ships: pages, models, configurations."""
