"""What a build writes beside an artifact: descriptions, inventories, limits, modules by device."""
