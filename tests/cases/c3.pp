# C3: proxy and output cross between two pipeline ranks at the same time
group pp = 0-1

r0: send proxy->1; recv output<-1
r1: send output->0; recv proxy<-0
