# I3: the last stage has no layers and never receives
group pp = 0-2

r0: F0; S F0->1; all_reduce
r1: R F0<-0; F0; send F0->2; all_reduce
r2: all_reduce
