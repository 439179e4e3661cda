"""What a request and an advertiser rule out: filters on columns, match types, negative keywords."""
