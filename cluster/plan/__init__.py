"""`sliceserve plan`: what a deployment needs and can reach, found out without hardware and without weights.

Sizes and costs come from the programs that the deployment would run, compiled for its slice (`compiled`), or from
formulas (`sizing`, `costs`), which check the compiled numbers and are what the search ranks with.
"""
