# H3: the last batch has fewer rows than there are microbatches
group pp = 0-1

r0:
  step GPipe n=4 { raise ValueError "Expecting 4 arg_mbs but got 3" }
r1:
  step GPipe n=4 { R F0<-0; F0 }
