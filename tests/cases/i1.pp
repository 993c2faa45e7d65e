# I1: a stage without parameters skips the all_reduce of the gradient norm
group pp = 0-1

r0: F0; S F0->1; all_reduce; F1; S F1->1
r1: R F0<-0; F0; R F1<-0; F1; all_reduce
