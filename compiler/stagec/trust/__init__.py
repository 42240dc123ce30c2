"""Who made a bundle, and whether it is what they signed: provenance, SBOM, signatures, verification, additions."""
