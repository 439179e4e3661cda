"""Several methods on one data set: trained over several seeds, measured alike, put into one table."""
