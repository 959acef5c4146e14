"""Recording what ranks say to the store while they make groups, and replaying it with thousands of light members."""
